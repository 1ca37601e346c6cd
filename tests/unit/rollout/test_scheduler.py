"""Which weights sample which batch, what a failure in the background does, how a step's groups are chosen and saved."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from columns import ids, logs, mask, same
from megatron_dppo.errors import CheckpointError, ConfigError
from megatron_dppo.report.clock import Clock
from megatron_dppo.rollout.batch import select_indices
from megatron_dppo.rollout.pending import PromptSlot
from megatron_dppo.rollout.request_scheduler import oversampled
from megatron_dppo.rollout.response import PartialResponse
from megatron_dppo.rollout.saved import SavedSubmission, SchedulerState, load_rollouts, save_rollouts
from megatron_dppo.rollout.store import StoredRollouts, load_groups, save_groups
from megatron_dppo.types import Completion, FinishReason, Rollout, RolloutGroup, SegmentCredit, ToolTime, VersionSpan
from tests.unit.configs import config
from tests.unit.streams import FakeEngine, FakeScorer, Numbers, Run, make, positions, unusable, values, versions


def run_of(staleness: int, has_signal: Callable[[int], bool] = lambda i: True, **rollout: Any) -> Run:
    return make(FakeEngine(), FakeScorer(has_signal), staleness=staleness, rollout=rollout)


@pytest.mark.parametrize(
    ("max_staleness", "expected"), [(0, [0, 1, 2, 3, 4, 5]), (1, [0, 0, 1, 2, 3, 4]), (2, [0, 0, 0, 1, 2, 3])]
)
def test_batch_b_is_sampled_with_the_weights_of_step_b_minus_max_staleness(
    max_staleness: int, expected: list[int]
) -> None:
    run = run_of(max_staleness)
    collected = run.steps(6)
    assert [versions(c) for c in collected] == [[v] * 4 for v in expected]
    assert [c.ages for c in collected] == [[step - v] * 4 for step, v in enumerate(expected)]
    assert max(age for c in collected for age in c.ages) == max_staleness
    assert [positions(c) for c in collected] == [list(range(4 * s, 4 * s + 4)) for s in range(6)]
    assert run.stream.cursor == 24, "nothing is sampled past the last step"


def test_prompts_and_seeds_of_a_batch_do_not_depend_on_max_staleness() -> None:
    tokens = [
        [[r.completion.token_ids.tolist() for g in c.groups for r in g.rollouts] for c in run_of(n).steps(6)]
        for n in (0, 1, 2)
    ]
    assert tokens[0] == tokens[1] == tokens[2]
    assert len({batch[0][0] for batch in tokens[0]}) == 6, "each step has a seed of its own"


def saved_and_loaded(run: Run, folder: Path) -> tuple[SchedulerState, dict[int, StoredRollouts]]:
    """By way of the files of a checkpoint."""
    save_rollouts(run.stream.stored_rollouts(), 0, folder)
    saved = SchedulerState.from_json(json.loads(json.dumps(run.stream.state().to_json())))
    return saved, load_rollouts(saved, 1, 0, folder, Numbers().__getitem__)


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_a_restored_run_continues_as_if_it_had_not_stopped(max_staleness: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"dynamic_sampling": True, "oversample": 1.5}
    expected = run_of(max_staleness, lambda i: i % 3 > 0, **settings).steps(6)
    first = run_of(max_staleness, lambda i: i % 3 > 0, **settings)
    assert same(first.steps(3), expected[:3])
    second = run_of(max_staleness, lambda i: i % 3 > 0, **settings)
    second.step = 3
    second.stream.restore(*saved_and_loaded(first, tmp_path))
    assert same(second.steps(6), expected[3:])
    assert second.engine.asked[0][0] > first.engine.asked[-1][-1], "nothing that was sampled is asked for again"


def test_a_background_failure_is_raised_before_the_weights_change() -> None:
    run = run_of(1, lambda i: bool(1 / (i < 8)))
    run.steps(1)
    run.stream.collect(1, 1, Clock())
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        run.stream.wait_before_update(Clock())
    run.stream.close()


def test_refills_of_an_old_batch_are_sampled_with_the_current_weights() -> None:
    collected = run_of(1, lambda i: i != 5, dynamic_sampling=True).steps(3)
    assert positions(collected[0]) == [0, 1, 2, 3]
    assert (positions(collected[1]), versions(collected[1])) == ([4, 6, 7, 8], [0, 0, 0, 1])
    assert collected[1].ages == [1, 1, 1, 0]
    assert collected[1].dropped_groups == {
        "no_signal": 1,
        "surplus": 0,
        "canceled": 0,
    }
    result = values(collected[1])
    assert result.pop("carried_groups") == 0
    dropped_groups = {"dropped_groups/no_signal": 1, "dropped_groups/surplus": 0, "dropped_groups/canceled": 0}
    assert result == {"policy_age": 0.75, "policy_age_max": 1, "stale_fraction": 0.75, **dropped_groups}


def test_oversampling_keeps_the_first_groups_with_signal_in_the_order_of_the_prompts() -> None:
    run = run_of(0, lambda i: i % 2 == 1, oversample=2)
    collected = run.steps(2)
    assert [positions(c) for c in collected] == [[1, 3, 5, 7], [9, 11, 13, 15]]
    assert [c.dropped_groups["no_signal"] for c in collected] == [4, 4] and run.stream.cursor == 16  # type: ignore[index]
    few = run_of(0, lambda i: i == 2, oversample=1.5).steps(1)[0]
    assert positions(few) == [2, 3, 4, 5], "too few with signal: the step keeps its size"
    refilled = run_of(0, lambda i: i > 5, oversample=1.5, dynamic_sampling=True)
    assert positions(refilled.steps(1)[0]) == [6, 7, 8, 9]
    assert refilled.stream.cursor == 12, "6 for the step, and 6 more for the 4 that were missing"


def test_groups_without_signal_are_never_preferred() -> None:
    assert select_indices([True, False, True, True], 2) == [0, 2]
    assert select_indices([False, True, False, False], 3) == [1, 2, 3]
    assert select_indices([False, False], 2) == [0, 1]
    assert [oversampled(100, f) for f in (1.0, 1.1, 1.101, 2.0)] == [100, 110, 111, 200]


def test_impossible_values_are_refused() -> None:
    for section, key, value in (
        ("train", "max_staleness", -1),
        ("train", "max_staleness", 1.5),
        ("rollout", "oversample", 0.5),
        ("rollout", "oversample", math.inf),
    ):
        with pytest.raises(ConfigError, match=key):
            config(**{section: {key: value}})


DRAWN = SchedulerState(
    cursor=14,
    next_step=5,
    ages={"3": 3},
    waiting=[[PromptSlot(9, 3)], [PromptSlot(2, 2)]],
    submissions=[
        [SavedSubmission(4, 3, [PromptSlot(10, 4), PromptSlot(11, 4), PromptSlot(7, 3)])],
        [SavedSubmission(4, 3, [PromptSlot(12, 4), PromptSlot(13, 4), PromptSlot(8, 3)])],
    ],
)


def test_saved_rollouts_are_unusable_after_a_change_that_concerns_them() -> None:
    was = config(train={"max_staleness": 1})
    plain = was.model_dump(mode="json")
    assert unusable(DRAWN, plain, was) == ""
    assert "max_staleness = 0" in unusable(DRAWN, plain, config())
    hotter = config(train={"max_staleness": 1}, rollout={"temperature": 0.9})
    assert "[rollout]" in unusable(DRAWN, plain, hotter)


@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_another_number_of_ranks_loses_no_prompt(dp: int) -> None:
    result = SchedulerState.from_json(DRAWN.with_data_parallel_size(dp).to_json())
    assert result.dp == dp and (result.cursor, result.next_step, result.ages) == (14, 5, {"3": 3})
    assert sorted(p for of_rank in result.waiting for p in of_rank) == [(2, 2), (9, 3)]
    drawn = [draw for of_rank in result.submissions for draw in of_rank]
    assert sorted(p.position for draw in drawn for p in draw.slots) == [7, 8, 10, 11, 12, 13]
    assert {(draw.step, draw.sampled_at) for draw in drawn} == {(4, 3)}
    assert len({len(draw.slots) for draw in drawn}) <= 2
    second = result.without_submissions(4)
    assert sorted(p.position for of_rank in second.waiting for p in of_rank) == [2, 7, 8, 9, 10, 11, 12, 13]
    assert second.next_step == 4 and not any(second.submissions)


def test_prompts_with_unusable_rollouts_are_submitted_first() -> None:
    run = run_of(0)
    run.step = 4
    run.stream.restore(
        SchedulerState(
            14, 5, {}, [[]], [[SavedSubmission(4, 3, [PromptSlot(10, 4), PromptSlot(11, 4)])]]
        ).without_submissions(4),
        {},
    )
    assert [positions(c) for c in run.steps(6)] == [[10, 11, 14, 15], [16, 17, 18, 19]]


def group(index: int, rewards: Sequence[float]) -> RolloutGroup:
    prompt = Numbers()[index]
    completion = Completion(
        token_ids=ids([3, 2**31 - 1]),
        logprobs=logs([-1 / 3, -math.inf]),
        finish_reason="length",
        policy_version=7,
        text='é"\n',
    )
    none = Completion(token_ids=ids([]), logprobs=None, finish_reason="stop", policy_version=7, text="")
    rollouts = [
        Rollout(prompt=prompt, completion=c, reward=r, reward_failed=r < 0)
        for c, r in zip((completion, none), rewards, strict=True)
    ]
    return RolloutGroup(prompt=prompt, rollouts=tuple(rollouts))


def test_rollouts_survive_a_file_unchanged(tmp_path: Path) -> None:
    numbers = Numbers()
    partial = PartialResponse(
        token_ids=ids([5, 6, 7]),
        logprobs=logs([-0.5, 0.0, -2.5]),
        sampled=mask([True, False, True]),
        versions=(VersionSpan(1, 0, 1), VersionSpan(2, 2, 3)),
        turn_ends=((1, FinishReason.STOP),),
        parts=2,
    )
    whole = replace(
        group(2, (0.1, -1.0)).rollouts[0].completion,
        tool_times=(ToolTime(1, 0.5, ("add", "add")),),
        segment_credits=(SegmentCredit("first", 0, 1.0), SegmentCredit("second", 1, -1.0)),
    )
    entries = [
        StoredRollouts(0, numbers[0], group(0, (0.1, -1.0))),
        StoredRollouts(1, numbers[1], group(1, (1e-300, 0.0))),
        StoredRollouts(2, numbers[2], (whole, partial)),
        StoredRollouts(9, numbers[9], None),
    ]
    save_groups(tmp_path / "a", entries)
    groups = load_groups(tmp_path / "a", numbers.__getitem__)
    assert same(groups, entries)
    assert type(groups[2].content[1].versions[0]) is VersionSpan  # type: ignore[index, union-attr]
    assert type(groups[2].content[0].tool_times[0]) is ToolTime  # type: ignore[index, union-attr]
    assert type(groups[2].content[0].segment_credits[1]) is SegmentCredit  # type: ignore[index, union-attr]
    assert type(groups[2].content[1].turn_ends[0][1]) is FinishReason  # type: ignore[index, union-attr]


def test_tables_and_tensors_in_any_field_survive_a_file(tmp_path: Path) -> None:
    """A dataclass takes any value: stands for the fields that a completion may get."""
    table = ((1.5, -math.inf), (0.1, 2.0))
    ragged = ((1,), (1, 2))
    numbers = Numbers()

    def there_and_back(changed: RolloutGroup) -> RolloutGroup:
        save_groups(tmp_path / "a", [StoredRollouts(0, numbers[0], changed)])
        (result,) = load_groups(tmp_path / "a", numbers.__getitem__)
        assert isinstance(result.content, RolloutGroup)
        return result.content

    for value in (table, ragged, ((True, False),), {"a": (1, 2.5), "b": None}, ("x", 1)):
        changed = group(0, (0.0, 1.0))
        object.__setattr__(changed.rollouts[0].completion, "logprobs", value)
        assert same(there_and_back(changed), changed)
    changed = group(0, (0.0, 1.0))
    object.__setattr__(changed.rollouts[0].completion, "logprobs", torch.arange(6).reshape(2, 3).T)
    loaded = there_and_back(changed)
    assert same(loaded.rollouts[0].completion.logprobs, torch.arange(6).reshape(2, 3).T)
    object.__setattr__(changed.rollouts[0].completion, "logprobs", {1, 2})
    with pytest.raises(TypeError, match="holds a set"):
        there_and_back(changed)


def test_a_damaged_file_and_other_data_are_named(tmp_path: Path) -> None:
    numbers = Numbers()
    save_groups(tmp_path / "a", [StoredRollouts(0, numbers[0], group(0, (0.0, 1.0)))])
    with pytest.raises(CheckpointError, match=r"row:0 .*row:1"):
        load_groups(tmp_path / "a", lambda position: numbers[position + 1])
    (tmp_path / "b").write_bytes((tmp_path / "a").read_bytes()[:-5])
    for name in ("b", "absent"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_groups(tmp_path / name, numbers.__getitem__)
