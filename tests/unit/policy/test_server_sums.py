"""Sums of each server on one rank, token by token in plain arithmetic."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from megatron_dppo.data.training_samples import RowShape, to_samples
from megatron_dppo.losses import BatchTotals
from megatron_dppo.mcore.row import RowRecord
from megatron_dppo.policy.packed import PackedBatch
from megatron_dppo.policy.server_sums import TokenSource, sum_by_server, without_servers
from megatron_dppo.types import (
    Completion,
    FinishReason,
    MicroBatches,
    Prompt,
    Rollout,
    RolloutGroup,
    TrainingSample,
    VersionSpan,
    token_ages,
)

VERSION = 7
A, B = "http://a", "http://b"


def episode(spans: tuple[VersionSpan, ...], sampled: str, lengths: tuple[int, ...] = ()) -> list[TrainingSample]:
    """The samples of an agent's episode: ``s`` is a sampled token, ``g`` a given one."""
    mask = torch.tensor([letter == "s" for letter in sampled])
    completion = Completion(
        token_ids=torch.arange(len(sampled), dtype=torch.int32),
        logprobs=torch.where(mask, -0.1 * torch.arange(1, len(sampled) + 1), 0.0),
        finish_reason=FinishReason.STOP,
        policy_version=3,
        text="",
        policy_versions=spans,
        loss_mask=mask,
        segment_lengths=lengths,
    )
    prompt = Prompt(prompt_id="p", text="", token_ids=(), label="", is_task=True)
    rollout = Rollout(prompt=prompt, completion=completion, reward=1.0)
    return to_samples([RolloutGroup(prompt=prompt, rollouts=(rollout,))], [[1.0]])


@pytest.mark.parametrize(
    ("spans", "sampled", "lengths"),
    [
        ((), "gsss", ()),
        ((), "ggss" + "gsgs", (4, 4)),
        ((VersionSpan(3, 0, 8),), "ggss" + "gsgs", (4, 4)),
        ((VersionSpan(3, 2, 4), VersionSpan(3, 5, 6), VersionSpan(3, 7, 8)), "ggss" + "gsgs", (4, 4)),
        ((VersionSpan(3, 1, 4), VersionSpan(3, 4, 8)), "gsss" + "gsss", (4, 4)),
    ],
)
def test_every_loss_token_of_an_agent_s_segment_is_in_a_span_of_its_labels(
    spans: tuple[VersionSpan, ...], sampled: str, lengths: tuple[int, ...]
) -> None:
    """The spans begin with the first sampled token, or with the first of all, which is no label."""
    for sample in episode(spans, sampled, lengths):
        assert all(0 <= span.start < span.end <= sample.num_tokens for span in sample.sources)
        assert (token_ages(sample.sources, sample.num_tokens, VERSION)[sample.loss_mask] == 4).all()
        row = RowRecord(*(torch.full((sample.num_tokens,), -0.5) for _ in range(4)))
        packed = PackedBatch(bins=[[0]], batches=NO_BATCHES, totals=BatchTotals(num_tokens=1, num_sequences=1))
        (sums,) = sum_by_server([sample], packed, [row], VERSION).values()
        assert sums.tokens == sample.num_loss_tokens > 0


NO_BATCHES = MicroBatches(0, lambda i: pytest.fail("not packed"))


def samples() -> list[TrainingSample]:
    """Several servers in one sample, one that is stale, a part without a loss token, and a sample without any."""

    def sample(mask: str, *sources: VersionSpan, first: float = -0.2) -> TrainingSample:
        inside = torch.tensor([letter == "x" for letter in mask])
        logprobs = torch.where(inside, first - 0.3 * torch.arange(len(mask)), 0.0)
        zeros = torch.zeros(len(mask), dtype=torch.int64)
        return TrainingSample(
            tokens=zeros,
            labels=zeros,
            loss_mask=inside,
            advantages=torch.ones(len(mask)),
            rollout_logprobs=logprobs,
            sources=sources,
        )

    return [
        sample(".xx.x", VersionSpan(VERSION, 1, 3, A), VersionSpan(5, 3, 5, B)),
        sample("...", VersionSpan(VERSION, 0, 3, A)),
        sample(".x..", VersionSpan(VERSION, 1, 2, B), VersionSpan(VERSION, 2, 4, A), first=-1.0),
        sample("xx", VersionSpan(VERSION, 0, 2, A), first=-3.0),
    ]


def expected_sums(rows: list[RowRecord], starts: list[tuple[int, int]]) -> dict[TokenSource, dict[str, float]]:
    totals: dict[TokenSource, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for sample, (number, start) in zip(samples(), starts, strict=True):
        assert sample.rollout_logprobs is not None
        for span in sample.sources:
            inside = [t for t in range(span.start, span.end) if bool(sample.loss_mask[t])]
            for t in inside:
                pi, mu = float(rows[number].logprobs[start + t]), float(sample.rollout_logprobs[t])
                entropy, divergence = (
                    float(column[start + t]) for column in (rows[number].entropy, rows[number].divergence)
                )
                q, d, x = abs(math.exp(pi) - math.exp(mu)), pi - mu, -mu - entropy
                values = {"tokens": 1.0, "prob_diff": q, "prob_diff_square": q * q, "log_diff": d}
                values |= {"abs_log_diff": abs(d), "log_diff_square": d * d, "divergence": divergence}
                values |= {"surprise": x, "surprise_square": x * x, "entropy": entropy}
                for name, value in values.items():
                    totals[TokenSource(span.server, span.policy_version != VERSION)][name] += value
            if inside:
                totals[TokenSource(span.server, span.policy_version != VERSION)]["responses"] += 1
    return totals


@pytest.mark.parametrize("multiple", [1, 4])
def test_the_sums_of_one_rank_are_those_by_hand(multiple: int) -> None:
    """Rows of several samples in another order, padded to a multiple; outside the loss mask stands nonsense."""
    shape = RowShape(sequence_multiple=multiple)
    bins, starts = [[2, 1], [0, 3]], [(0, 0)] * 4
    sizes = []
    for number, indices in enumerate(bins):
        start = 0
        for i in indices:
            starts[i] = (number, start)
            start += shape.padded(samples()[i].num_tokens)
        sizes.append(start)
    generator = torch.Generator().manual_seed(1)
    rows = []
    for size in sizes:
        columns = [torch.rand(size, generator=generator) for _ in range(3)]
        rows.append(RowRecord(torch.full((size,), math.nan), columns[0] > 0.5, columns[1], columns[2]))
    for sample, (number, start) in zip(samples(), starts, strict=True):
        assert sample.rollout_logprobs is not None
        for t in range(sample.num_tokens):
            if sample.loss_mask[t]:
                # Less than a nat away.
                rows[number].logprobs[start + t] = sample.rollout_logprobs[t] * (0.8 + 0.1 * t)
    packed = PackedBatch(bins=bins, batches=NO_BATCHES, totals=BatchTotals(num_tokens=1, num_sequences=1), shape=shape)
    result = sum_by_server(samples(), packed, rows, VERSION)
    expected = expected_sums(rows, starts)
    assert result.keys() == expected.keys() == {(A, False), (B, True), (B, False)}
    for source, sums in result.items():
        by_name = {name: getattr(sums, name) for name in expected[source]}
        assert by_name == pytest.approx(dict(expected[source]), rel=1e-6), source
    assert sum_by_server(samples(), packed, [], VERSION) == {}


def test_a_sample_of_which_a_rejected_server_sampled_a_part_leaves_the_loss() -> None:
    remaining = [without_servers(sample, {B}).num_loss_tokens for sample in samples()]
    assert remaining == [0, 0, 0, 2]
    assert all(without_servers(sample, {"http://c"}) is sample for sample in samples())
    unknown = replace(samples()[0], sources=())
    assert without_servers(unknown, {A, B}) is unknown
