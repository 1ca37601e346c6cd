"""Masked tokens by age: responses of several policy versions from their update to the report, counted by hand."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_dppo.data.training_samples import to_samples
from megatron_dppo.losses import BatchTotals
from megatron_dppo.policy.packed import PackedBatch
from megatron_dppo.report.steps.files import StepMeta, write_step
from megatron_dppo.report.steps.tokens import UNKNOWN_AGE, read_tokens
from megatron_dppo.rollout.batch import CollectedRollouts
from megatron_dppo.run.recording import StepRecord
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
from megatron_dppo_report.masks import MaskCounts
from megatron_dppo_report.steps import step_view

VERSION = 9
"""Version at the start of the step."""


def response(count: int, *spans: VersionSpan, **changes: Any) -> Completion:
    return Completion(
        token_ids=torch.arange(count, dtype=torch.int32),
        logprobs=torch.full((count,), -0.5),
        finish_reason=FinishReason.STOP,
        policy_version=VERSION,
        text="",
        policy_versions=spans,
        **changes,
    )


def group(completion: Completion, *, is_task: bool = False) -> RolloutGroup:
    prompt = Prompt(prompt_id="p", text="", token_ids=() if is_task else (7, 8), label="", is_task=is_task)
    return RolloutGroup(prompt=prompt, rollouts=(Rollout(prompt=prompt, completion=completion, reward=1.0),))


def groups() -> list[RolloutGroup]:
    """A carried response of three versions; an episode of two segments; one without spans; one that never trained."""
    sampled = torch.tensor([letter == "s" for letter in "ggsss" + "ggss"])
    spans = (VersionSpan(5, 2, 3), VersionSpan(9, 3, 5), VersionSpan(9, 7, 8), VersionSpan(7, 8, 9))
    return [
        group(response(6, VersionSpan(3, 0, 2), VersionSpan(5, 2, 5), VersionSpan(9, 5, 6))),
        group(response(9, *spans, loss_mask=sampled, segment_lengths=(5, 4)), is_task=True),
        group(response(3)),
        group(response(3)),
    ]


def train(record: StepRecord, samples: list[TrainingSample], masked: list[set[int]], version: int) -> None:
    """Record one update at a version that masked these labels of each sample."""
    rows = []
    for sample, labels in zip(samples, masked, strict=True):
        keep = torch.tensor([t not in labels for t in range(sample.num_tokens)])
        rows.append(SimpleNamespace(logprobs=torch.full((sample.num_tokens,), -0.6), keep=keep))
    bins = [[i] for i in range(len(samples))]
    no_batches = MicroBatches(0, lambda i: pytest.fail("not packed"))
    packed = PackedBatch(bins=bins, batches=no_batches, totals=BatchTotals(num_tokens=1, num_sequences=1))
    record.watch.add(samples, packed, rows, version)  # type: ignore[arg-type]


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, list[TrainingSample]]:
    """File of the step, and its samples.

    It has four updates, of which the third is skipped: the first is at version 9, the fourth at 11. The second and the
    third have no samples here.
    """
    collected = CollectedRollouts(groups=groups(), ages=[3, 2, 0, 0], dropped_groups={}, token_ages={})
    record = StepRecord(VERSION)
    samples = to_samples(collected.groups, [[1.0]] * 4)
    # Label t is token t + 1 of the sequence: a response begins at label 1, an agent's segment has no label of token 0.
    samples[1] = replace(samples[1], loss_mask=samples[1].loss_mask & torch.tensor([True, True, True, False]))
    samples[3] = replace(samples[3], advantages=samples[3].advantages * torch.tensor([1.0, 1.0, 1.0, 0.0]))
    samples = record.number_samples(samples, dp_rank=0)
    train(record, samples[:1], [{1, 3, 4}], VERSION)
    train(record, [], [], VERSION + 1)
    train(record, [], [], VERSION + 2)
    train(record, samples[1:4], [{2}, {2}, {2}], VERSION + 2)
    part = record.build_rank_part(collected, 0, record.watch.samples)
    return write_step(tmp_path, StepMeta(1, VERSION, 1, 1, "", "dppo_binary_tv"), [part]), samples


def age_table(*files: Path) -> object:
    counts = MaskCounts()
    for file in files:
        counts.add(read_tokens(file), None, 5.0, None)
    view = counts.view()
    assert view is not None and (view["masked"], view["tokens"]) == (6 * len(files), 12 * len(files))
    return view["ages"]


def test_masked_shares_by_the_age_of_each_token_are_those_counted_by_hand(
    trained: tuple[Path, list[TrainingSample]],
) -> None:
    """The carried response is of ages 6 6 4 4 4 0, of which tokens 0, 2 and 3 are masked.

    The episode trains on tokens of ages 6 2 and 2 4 (9 - 5 is 4 at the start, and two updates were applied since); the
    2 of its first segment and the 4 are masked. Of the last response two tokens have an advantage, and one is masked.
    """
    assert age_table(trained[0]) == [["0", 0, 1], ["2", 2, 4], ["4", 3, 4], ["6", 1, 3]]


def test_recorded_ages_are_the_inputs_of_threshold_age(trained: tuple[Path, list[TrainingSample]]) -> None:
    file, samples = trained
    step = read_tokens(file)
    inputs: list[float] = []
    for sample, version in zip(samples[:4], (VERSION, *[VERSION + 2] * 3), strict=True):
        inputs += token_ages(sample.sources, sample.num_tokens, version)[sample.loss_mask].tolist()
    assert step.ages[step.trained].tolist() == inputs
    assert (step.ages[step.starts[3] :] == UNKNOWN_AGE).all(), "no update trained on it"


def test_the_page_shows_runs_of_tokens_of_one_age(trained: tuple[Path, list[TrainingSample]]) -> None:
    view = step_view(read_tokens(trained[0]), None, (100, 9))
    by_sample = {each["sample"]: each["ages"] for each in view["responses"]}
    assert by_sample == {0: [[0, 6], [2, 4], [5, 0]], 1: [[2, 6], [3, 2], [8, 4]], 2: [[0, 2]], 3: []}


def test_files_of_earlier_versions_open_and_lack_ages(trained: tuple[Path, list[TrainingSample]]) -> None:
    parquet = import_module("pyarrow.parquet")
    for lacking in ("trained_policy_version", "policy_versions"):
        old = trained[0].with_name(f"{lacking}.parquet")
        parquet.write_table(parquet.read_table(trained[0]).drop_columns([lacking]), old)
        assert age_table(old) == [[None, 6, 12]]
    assert age_table(old, trained[0]) == [[None, 6, 12], ["0", 0, 1], ["2", 2, 4], ["4", 3, 4], ["6", 1, 3]]


def test_many_ages_are_counted_in_ranges() -> None:
    """Ages up to 48 in 24 rows: three ages a row."""
    counts = MaskCounts(ages={48: [1, 2], 0: [1, 5], 2: [0, 4], 3: [2, 2]}, tokens=13)
    view = counts.view()
    assert view is not None and view["ages"] == [["0-2", 1, 9], ["3-5", 2, 2], ["48-50", 1, 2]]
