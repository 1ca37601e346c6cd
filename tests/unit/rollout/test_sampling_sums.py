"""Ranks and repeats: their sums by hand, their expectations by enumeration, and what lies do to them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dppo.rollout.repeats import repeat_sums
from megatron_dppo.types import (
    Completion,
    FinishReason,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
    VersionSpan,
)
from megatron_dppo_engines.sampling_sums import RankSums, rank_sums
from megatron_dppo_engines.server import Echo, GenerateRequest, Generation

P = [0.5, 0.3, 0.15, 0.05]
"""Probabilities of four tokens; token i is the i-th most probable one."""


def sums_of(token: int, k: int, **params: Any) -> RankSums:
    """The sums of one sampled token, with the K most probable ones as a Top-K, or K = 0 for the witness alone."""
    logs = torch.tensor([[math.log(p) for p in P]])
    width = max(k, 1)
    inside = token < width
    topk_ids = torch.tensor([[*range(width), -1 if inside else token]], dtype=torch.int32)
    last = torch.zeros(1, 1) if inside else logs[:, token : token + 1]
    generation = Generation(
        token_ids=torch.tensor([token], dtype=torch.int32),
        logprobs=logs[:, token],
        finish_reason=FinishReason.LENGTH,
        versions=(VersionSpan(0, 0, 1),),
        topk_token_ids=topk_ids if k else None,
        topk_logprobs=torch.cat([logs[:, :width], last], 1) if k else None,
        echo=Echo(best_token_ids=np.array([0], np.int32), best_logprobs=logs[:, 0].numpy()),
    )
    settings = SamplingParams(max_new_tokens=1, **params)
    return rank_sums(generation, GenerateRequest(request_id="r", token_ids=(1,), params=settings))


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4])
def test_the_expectation_of_the_shift_is_0_and_its_variance_is_exact(k: int) -> None:
    outcomes = [sums_of(token, k) for token in range(len(P))]
    assert sum(p * each.shift for p, each in zip(P, outcomes, strict=True)) == pytest.approx(0, abs=1e-7)
    variance = sum(p * each.shift**2 for p, each in zip(P, outcomes, strict=True))
    assert all(each.variance == pytest.approx(variance, rel=1e-6) for each in outcomes)
    assert sum(p * each.best for p, each in zip(P, outcomes, strict=True)) == pytest.approx(outcomes[0].best_expected)


def test_the_middles_by_hand() -> None:
    # With K = 2: .5 -> middle .25; .3 -> .65; both others together .2 -> .9.
    assert [sums_of(token, 2).shift for token in range(4)] == pytest.approx([-0.25, 0.15, 0.4, 0.4])


def test_greedy_and_filtered_requests_are_not_judged() -> None:
    assert sums_of(0, 2, temperature=0.0) == sums_of(0, 2, top_p=0.9) == RankSums()


PROMPT = Prompt(prompt_id="p", text="p", token_ids=(1,), label="")


def completion(tokens: tuple[int, ...], probability: float, server: str = "http://a") -> Completion:
    logprob = math.log(probability) / len(tokens)
    return Completion(
        token_ids=torch.tensor(tokens, dtype=torch.int32),
        logprobs=torch.full((len(tokens),), logprob),
        finish_reason=FinishReason.STOP,
        policy_version=0,
        text="",
        policy_versions=(VersionSpan(0, 0, len(tokens), server),),
    )


def group(*completions: Completion) -> RolloutGroup:
    return RolloutGroup(
        prompt=PROMPT, rollouts=tuple(Rollout(prompt=PROMPT, completion=each, reward=0.0) for each in completions)
    )


def test_repeats_by_hand() -> None:
    found = repeat_sums([group(completion((1, 2), 0.1), completion((1, 2), 0.1), completion((3,), 0.2))])
    # The second equals the first, which had .1; the third could have equalled the only distinct one, again .1.
    assert found["http://a"].repeats == 1 and found["http://a"].responses == 3
    assert found["http://a"].expected == pytest.approx(0 + 0.1 + 0.1)


def test_each_server_has_the_responses_that_it_sampled() -> None:
    found = repeat_sums([group(completion((1,), 0.5, "http://a"), completion((1,), 0.5, "http://b"))])
    assert found["http://a"].repeats == 0 and found["http://b"].repeats == 1


def test_failed_episodes_and_responses_without_logprobs_do_not_count() -> None:
    failed = replace(completion((1,), 0.5), failure="no answer")
    unknown = replace(completion((1,), 0.5), logprobs=None)
    assert repeat_sums([group(failed, failed, unknown)]) == {}


@pytest.mark.parametrize("size", [2, 5, 9])
def test_the_expectation_of_repeats_is_right_over_all_outcomes(size: int) -> None:
    """Random groups of five possible responses: the mean of (repeats - expected) is 0 within its error."""
    random = np.random.default_rng(size)
    differences = []
    for _ in range(2000):
        drawn = random.choice(4, size=size, p=P)
        (sums,) = repeat_sums([group(*(completion((int(i),), P[i]) for i in drawn))]).values()
        differences.append(sums.repeats - sums.expected)
    error = np.std(differences) / math.sqrt(len(differences))
    assert abs(np.mean(differences)) < 4 * error
