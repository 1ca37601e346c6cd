"""Ages of tokens, requests that are sampled ahead, seeds of single groups, and groups carried to other ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from columns import ids, logs, mask
from megatron_dppo.rollout.batch import PolicyAges, has_signal
from megatron_dppo.rollout.engine import GroupRequest, SampledFuture
from megatron_dppo.rollout.pending import PromptSlot
from megatron_dppo.rollout.response import PartialResponse
from megatron_dppo.rollout.saved import SavedSubmission, SchedulerState, load_rollouts, save_rollouts
from megatron_dppo.rollout.store import StoredRollouts
from megatron_dppo.types import Completion, Rollout, RolloutGroup, SamplingParams, VersionSpan
from tests.unit.configs import config
from tests.unit.streams import FakeScorer, Numbers, Run, make, unusable


class LateEngine:
    """Answers at once, but for some positions only when the weights reach a version."""

    def __init__(self, late: dict[int, int]) -> None:
        self.policy_version = -1
        self.late = late
        self.seeds: dict[tuple[int, ...], int] = {}
        self._pending: dict[int, list[tuple[SampledFuture, list[Completion]]]] = {}

    def submit(
        self, groups: Sequence[GroupRequest], params: SamplingParams, enough: int, keep: Collection[int] = ()
    ) -> list[SampledFuture]:
        self.seeds[tuple(group.key for group in groups)] = params.seed
        futures: list[SampledFuture] = [Future() for _ in groups]
        for group, future in zip(groups, futures, strict=True):
            answer = [completion(self.policy_version)] * group.siblings
            if self.late.get(group.key, 0) > self.policy_version:
                self._pending.setdefault(self.late[group.key], []).append((future, answer))
            else:
                future.set_result(answer)
        return futures

    def update_weights(self, version: int) -> None:
        self.policy_version = version
        for future, answer in self._pending.pop(version, []):
            future.set_result(answer)


def completion(version: int) -> Completion:
    return Completion(
        token_ids=ids([3, 4]),
        logprobs=logs([-0.1, -0.2]),
        finish_reason="stop",  # type: ignore[arg-type]
        policy_version=version,
        text="",
    )


def group(version: int, rewards: Sequence[float | None] = (0.0, 1.0)) -> RolloutGroup:
    """A group of one rollout a reward; None is a reward that failed."""
    prompt = Numbers()[0]
    rollouts = [
        Rollout(prompt=prompt, completion=completion(version), reward=reward or 0.0, reward_failed=reward is None)
        for reward in rewards
    ]
    return RolloutGroup(prompt=prompt, rollouts=tuple(rollouts))


def test_a_version_that_no_step_may_train_on_is_an_error() -> None:
    ages = PolicyAges(1)
    for step, version in enumerate((10, 11, 11, 12)):
        ages.begin_step(step, version)
    restored = PolicyAges(1)
    restored.restore(ages.state())
    restored.begin_step(3, 12)
    for each in (ages, restored):
        assert each.count_tokens_by_age(group(12)) == {0: 4}
        assert each.count_tokens_by_age(group(11)) == {1: 4}, "a skipped update does not make tokens older"
        for version in (10, 13, -1):
            with pytest.raises(RuntimeError, match=f"version {version}, .*11, 12"):
                each.count_tokens_by_age(group(version))


@pytest.mark.parametrize("staleness", [2, 3])
def test_a_group_that_is_trained_on_one_step_later_is_sampled_one_step_less_ahead(staleness: int) -> None:
    # The last group of each step is ready only when its step is over.
    engine = LateEngine({4 * step + 3: step + 1 for step in range(5)})
    run = make(engine, FakeScorer(), staleness=staleness, rollout={"engine": "sglang", "order": "completed"})
    collected = run.steps(5)
    assert max(age for each in collected for age in each.ages) == staleness
    assert all(len(each.groups) == 4 for each in collected)


def run_with_seeds(staleness: int, rank: int = 0) -> Run:
    settings: dict[str, Any] = {"engine": "sglang"}
    return make(LateEngine({}), FakeScorer(), staleness=staleness, dp=2, rank=rank, rollout=settings)


def test_groups_submitted_one_by_one_have_seeds_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_dppo.rollout.scheduler.all_gather_objects", lambda value, group: [value, value])
    seeds = []
    for rank in range(2):
        run = run_with_seeds(1, rank)
        run.steps(3)
        assert len(run.engine.seeds) == 16 and all(len(keys) == 1 for keys in run.engine.seeds)
        seeds += list(run.engine.seeds.values())
    assert len(set(seeds)) == 32, "siblings of two groups would be the same samples"
    second = run_with_seeds(1)
    second.steps(3)
    assert list(second.engine.seeds.values()) == seeds[:16]


def test_refills_and_ranks_have_seeds_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Submitted together, the groups of a step share a seed; each refill, each step and each rank has another one."""
    monkeypatch.setattr("megatron_dppo.rollout.scheduler.all_gather_objects", lambda value, group: [value, value])
    seeds = []
    for rank in range(2):
        engine = LateEngine({})
        settings = {"dynamic_sampling": True, "max_refills": 3}
        make(engine, FakeScorer(lambda i: False), dp=2, rank=rank, rollout=settings).steps(2)
        assert len(engine.seeds) == 8
        seeds += list(engine.seeds.values())
    assert len(set(seeds)) == 16


def test_single_groups_stay_single_on_another_number_of_ranks() -> None:
    single = [[SavedSubmission(2, 1, [PromptSlot(position, 2)]) for position in part] for part in ((0, 1, 4), (2, 3))]
    for dp in (1, 3):
        result = SchedulerState(8, 3, {}, [[], []], single).with_data_parallel_size(dp).submissions
        assert all(len(each.slots) == 1 for submissions in result for each in submissions)
        assert sorted(each.slots[0].position for submissions in result for each in submissions) == [0, 1, 2, 3, 4]


def test_only_scored_samples_give_a_group_signal() -> None:
    cases: dict[tuple[float | None, ...], bool] = {
        (1.0, None): False,
        (1.0, 1.0, None): False,
        (None, None): False,
        (1.0, 0.0, None): True,
        (0.0, 0.5): True,
        (0.0, 0.0): False,
    }
    assert {rewards: has_signal(group(0, rewards)) for rewards in cases} == cases


def test_saved_rollouts_are_sampled_anew_after_a_change_of_any_section_that_made_them() -> None:
    state = SchedulerState(8, 2, {"0": 0}, [[]], [[]])
    saved = config().model_dump(mode="json")
    assert unusable(state, saved, config()) == ""
    changes: dict[str, dict[str, Any]] = {
        "reward": {"function": "math", "timeout_seconds": 3.0},
        "data": {"max_prompt_tokens": 7},
        "rollout": {"temperature": 0.7},
        "agent": {"max_calls": 3},
    }
    for section, values in changes.items():
        changed = config()
        object.__setattr__(changed, section, getattr(changed, section).model_copy(update=values))
        assert unusable(state, saved, changed) == f"the section [{section}] has changed"


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_carried_groups_continue_on_another_number_of_ranks(dp: int, tmp_path: Path) -> None:
    """Five groups of two ranks that were stopped while sampled; no rank has submitted anything."""
    numbers = Numbers()
    partial = PartialResponse(
        token_ids=ids([5, 6]),
        logprobs=logs([-0.5, -1.0]),
        sampled=mask([True, True]),
        versions=(VersionSpan(1, 0, 2),),
        turn_ends=(),
        parts=1,
    )
    waiting = [[0, 3], [1, 2, 4]]
    for rank, carried in enumerate(waiting):
        save_rollouts([StoredRollouts(position, numbers[position], (partial,)) for position in carried], rank, tmp_path)
    slots = [[PromptSlot(position, 0) for position in carried] for carried in waiting]
    state = SchedulerState(8, 1, {"1": 0}, slots, [[], []])
    resharded = state.with_data_parallel_size(dp)
    assert sorted(slot.position for each in resharded.waiting for slot in each) == [0, 1, 2, 3, 4]
    for rank, carried_slots in enumerate(resharded.waiting):
        contents = load_rollouts(state, dp, rank, tmp_path, numbers.__getitem__)
        assert all(contents[slot.position].content is not None for slot in carried_slots)
