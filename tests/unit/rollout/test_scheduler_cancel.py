"""Steps that stop their slowest groups: whose turn it is, what is carried, how old it is, what a resume loses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from transformers import Qwen3Config

from columns import ids, logs
from fake_servers import END, FakeServer
from megatron_dppo.engines.server_engine import ServerEngine
from megatron_dppo.errors import RewardError
from megatron_dppo.report.clock import Clock
from megatron_dppo.rewards.item import RewardResult
from megatron_dppo.rollout.batch import CollectedRollouts
from megatron_dppo.rollout.engine import GroupRequest, SampledFuture
from megatron_dppo.rollout.saved import SchedulerState
from megatron_dppo.types import Completion, SamplingParams, VersionSpan
from tests.unit.engines.test_server_engine import FakeTokenizer, publish
from tests.unit.streams import FakeScorer, Run, make, positions, values


class Turtle:
    """Answers all groups but those at ``slow`` positions, which need as many calls as stand there."""

    def __init__(self, slow: dict[int, int]) -> None:
        self.policy_version, self.slow = -1, dict(slow)
        self.calls: list[list[int]] = []
        self.kept: dict[int, list[int]] = {}

    def submit(
        self, groups: Sequence[GroupRequest], params: SamplingParams, enough: int, keep: Collection[int] = ()
    ) -> list[SampledFuture]:
        keys = [group.key for group in groups]
        assert [int(group.prompt.text) for group in groups] == keys
        self.calls.append(keys)
        result: list[SampledFuture] = []
        for group in groups:
            self.slow[group.key] = self.slow.get(group.key, 0) - 1
            self.kept.setdefault(group.key, []).append(self.policy_version)
            result.append(Future())
            stopped = self.slow[group.key] >= 0
            result[-1].set_result(None if stopped else [self._completion(group.key)] * group.siblings)
        assert sum(future.result() is not None for future in result) >= enough
        self.kept = {key: versions for key, versions in self.kept.items() if key in keep or key not in keys}
        return result

    def _completion(self, key: int) -> Completion:
        versions = self.kept[key]
        spans = tuple(VersionSpan(version, 4 * i, 4 * i + 4) for i, version in enumerate(versions))
        return Completion(
            token_ids=ids([5] * (4 * len(versions))),
            logprobs=logs([-1.0] * (4 * len(versions))),
            finish_reason="stop",  # type: ignore[arg-type]
            policy_version=max(versions),
            text="",
            policy_versions=spans,
        )

    def restore(self, groups: Any) -> None:
        assert not groups

    def update_weights(self, version: int) -> None:
        self.policy_version = version


def run_with(
    engine: Any, carry: int, scorer: Any = None, staleness: int = 0, dp: int = 1, rank: int = 0, **more: Any
) -> Run:
    extra = {"engine": "sglang", "abort_slowest": True, "partial_rollouts": carry, "oversample": 1.5}
    return make(engine, scorer or FakeScorer(), staleness=staleness, dp=dp, rank=rank, rollout=extra | more)


def waiting(run: Run) -> list[list[int]]:
    return [[place.position for place in places] for places in run.stream.state().waiting]


def test_a_canceled_group_comes_first_in_the_next_step() -> None:
    engine = Turtle({1: 1, 4: 1, 9: 2})
    run = run_with(engine, carry=2)
    collected = run.steps(4)
    assert engine.calls == [[0, 1, 2, 3, 4, 5], [1, 4, 6, 7, 8, 9], [9, *range(10, 15)], [9, *range(15, 20)]]
    assert [positions(c) for c in collected] == [[0, 2, 3, 5], [1, 4, 6, 7], [10, 11, 12, 13], [9, 15, 16, 17]]
    assert run.stream.cursor == 20, "every prompt is taken once"
    assert [c.num_carried for c in collected] == [2, 1, 1, 0]
    assert [sum(c.dropped_groups.values()) for c in collected] == [0, 1, 1, 2]
    assert waiting(run) == [[]]


def test_carried_groups_count_although_the_next_step_is_submitted_at_once() -> None:
    """As with ``train.max_staleness`` and the local engine, whose next step begins with them before this one ends."""
    rollout = {"engine": "local", "abort_slowest": True, "partial_rollouts": 2, "oversample": 1.5}
    run = make(Turtle({1: 1, 4: 1, 9: 2}), FakeScorer(), staleness=1, rollout=rollout)
    assert [c.num_carried for c in run.steps(4)] == [2, 1, 1, 0] and waiting(run) == [[]]


def test_groups_canceled_for_good_are_counted_as_dropped() -> None:
    result = [c.dropped_groups for c in run_with(Turtle({1: 1, 4: 1, 7: 3}), carry=0).steps(2)]
    assert result == [{"no_signal": 0, "surplus": 0, "canceled": 2}, {"no_signal": 0, "surplus": 1, "canceled": 1}]


def test_ages_are_those_of_the_tokens() -> None:
    collected = run_with(Turtle({1: 2}), carry=3).steps(3)
    assert positions(collected[2])[0] == 1 and collected[2].ages == [2, 0, 0, 0]
    # 2 siblings, 4 tokens a step: 8 of age 2, 8 of age 1, and 4 groups of 8 of age 0.
    result = values(collected[2])
    assert result["policy_age"] == (8 * 2 + 8 * 1) / (8 + 8 + 4 * 8)
    assert result["policy_age_max"] == 2 and result["stale_fraction"] == 0.25
    assert [values(c)["policy_age"] for c in collected[:2]] == [0, 0]


def test_a_skipped_update_does_not_make_tokens_older() -> None:
    run = run_with(Turtle({1: 1}), carry=3)
    run.engine.update_weights(0)
    for step in range(2):
        collected = run.stream.collect(step, 0, Clock())
    assert positions(collected)[0] == 1 and collected.ages == [0, 0, 0, 0], "the same weights"


@pytest.mark.parametrize(("limit", "asked"), [(0, 1), (1, 2), (2, 3)])
def test_a_group_is_carried_for_the_allowed_number_of_steps_and_then_dropped(limit: int, asked: int) -> None:
    engine = Turtle({3: 99})
    run = run_with(engine, carry=limit)
    collected = run.steps(5)
    assert sum(3 in call for call in engine.calls) == asked
    assert all(3 not in positions(c) for c in collected)
    assert max(c.ages[0] for c in collected) == 0 and not engine.kept.get(3)
    assert len(run.stream.state().ages) == limit + 1


def test_refills_continue_canceled_groups() -> None:
    engine = Turtle({1: 1})
    run = run_with(engine, carry=1, scorer=FakeScorer(lambda i: i not in (0, 2)), dynamic_sampling=True)
    (collected,) = run.steps(1)
    # 6 at first, 5 of them complete, 3 of those with signal; for the 1 that lacks, the stopped one and a new one.
    assert engine.calls == [[0, 1, 2, 3, 4, 5], [1, 6]]
    assert positions(collected) == [3, 4, 5, 1] and run.stream.cursor == 7


def test_a_resume_continues_canceled_groups() -> None:
    run = run_with(Turtle({1: 9, 4: 9}), carry=3)
    run.steps(1)
    second = run_with(Turtle({}), carry=3)
    second.step = 1
    second.stream.restore(SchedulerState.from_json(run.stream.state().to_json()), {})
    assert positions(second.steps(2)[0]) == [1, 4, 6, 7]


@pytest.mark.parametrize("staleness", [1, 2])
def test_groups_canceled_while_sampled_ahead_continue_in_the_next_batch(staleness: int) -> None:
    engine = Turtle({7: 1})
    run = run_with(engine, carry=2, staleness=staleness)
    collected = run.steps(5)
    assert engine.calls[:2] == [list(range(6)), list(range(6, 12))] and 7 in engine.calls[staleness + 2]
    trained = [p for c in collected for p in positions(c)]
    assert len(trained) == len(set(trained)) == 20 and 7 in trained
    assert max(age for c in collected for age in c.ages) <= staleness + 2
    assert run.stream.cursor == len(set(p for call in engine.calls for p in call))


@pytest.mark.parametrize("order", ["stream", "completed"])
def test_groups_without_signal_are_replaced_by_those_of_later_steps_and_these_by_new_prompts(order: str) -> None:
    engine, settings = Turtle({}), {"engine": "sglang", "dynamic_sampling": True, "order": order}
    run = make(engine, FakeScorer(lambda i: i % 2 == 1), staleness=2, rollout=settings)
    collected = run.steps(6)
    # All answers are there at once, so that both orders take the prompts as they come.
    assert [p for c in collected for p in positions(c)] == list(range(1, 48, 2))
    assert all(c.dropped_groups == {"no_signal": 4, "surplus": 0, "canceled": 0} for c in collected)
    assert [max(c.ages) for c in collected[1:]] == [1] * 5, "what is under way is topped up, not used up"
    assert all(len(call) == 1 for call in engine.calls)


def test_a_reward_that_fails_for_a_group_costs_that_group_and_for_a_step_the_run() -> None:
    class Fails(FakeScorer):
        def __init__(self, broken: Callable[[int], bool]) -> None:
            super().__init__()
            self.broken = broken

        def score(self, items: Sequence[Any], *, is_batch: bool) -> list[Any]:
            assert not is_batch
            actual = super().score(items, is_batch=is_batch)
            return [
                replace(result, failed=self.broken(int(item.prompt)))
                for result, item in zip(actual, items, strict=True)
            ]

    settings = {"engine": "sglang"}
    (step,) = make(Turtle({}), Fails(lambda i: i == 1), staleness=1, rollout=settings).steps(1)
    assert [all(r.reward_failed for r in group.rollouts) for group in step.groups] == [False, True, False, False]
    with pytest.raises(RewardError, match=r"reward\.function = 'math'"):
        make(Turtle({}), Fails(lambda i: True), staleness=1, rollout=settings).steps(1)
    # A rank with a single group has no other check.
    settings = {"engine": "sglang", "prompts_per_step": 1, "samples_per_prompt": 4}
    with pytest.raises(RewardError, match=r"all 4 .*same command"):
        make(Turtle({}), Fails(lambda i: True), rollout=settings).steps(1)


def test_ranks_take_new_prompts_in_turn_whatever_they_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier, box = threading.Barrier(2), {}

    def all_gather_objects(value: Any, group: Any) -> list[Any]:
        rank = int(threading.current_thread().name)
        box[rank] = value
        barrier.wait(10)
        values = [box[0], box[1]]
        barrier.wait(10)
        return values

    monkeypatch.setattr("megatron_dppo.rollout.scheduler.all_gather_objects", all_gather_objects)
    runs = [run_with(Turtle({1: 1, 3: 1}), carry=2, dp=2, rank=rank) for rank in range(2)]
    result: dict[int, list[CollectedRollouts]] = {}
    threads = [
        threading.Thread(target=lambda rank=rank: result.update({rank: runs[rank].steps(3)}), name=str(rank))
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert runs[0].engine.calls == [list(range(6)), [1, 3, 12, 13, 14, 15], list(range(22, 28))]
    assert runs[1].engine.calls == [list(range(6, 12)), list(range(16, 22)), list(range(28, 34))]
    assert [run.stream.cursor for run in runs] == [34, 34]
    assert [run.stream._waiting for run in runs] == [[[], []], [[], []]]
    assert positions(result[0][1]) == [1, 3, 12, 13]


def test_with_real_requests_every_prompt_is_collected_in_some_step() -> None:
    """The engine, the pool and two fake servers whose weights change; prompts of odd number are slow."""
    servers = [FakeServer(f"http://s:{i}", token_seconds=0.002) for i in range(2)]
    for server in servers:
        server.sample = lambda request, position: END if position == (60 if request.token_ids[0] % 2 else 10) else 5
    engine = ServerEngine(servers, FakeTokenizer(), CONFIG, max_in_flight=64, health_seconds=1)  # type: ignore
    run = run_with(engine, carry=5, scorer=AllDiffer())
    seen: list[int] = []
    for step in range(6):
        publish(engine, servers, 10 * step)
        collected = run.stream.collect(step, engine.policy_version, Clock())
        for group, age in zip(collected.groups, collected.ages, strict=True):
            seen.append(group.prompt.token_ids[0])
            for rollout in group.rollouts:
                spans = rollout.completion.policy_versions
                assert len(rollout.completion.token_ids) == (59 if seen[-1] % 2 else 9)
                assert [spans[0].start, spans[-1].end] == [0, len(rollout.completion.token_ids)]
                assert [s.policy_version for s in spans] == sorted({s.policy_version for s in spans})
            assert age <= 5
    assert len(seen) == len(set(seen)) == 24 and any(i % 2 for i in seen)
    (held,) = map(set, waiting(run))
    assert set(engine.unfinished()) == held and not held & set(seen)
    engine.close()


class AllDiffer:
    def score(self, items: Sequence[Any], *, is_batch: bool) -> list[Any]:
        return [RewardResult(reward=float(i)) for i, _ in enumerate(items)]


CONFIG = Qwen3Config(eos_token_id=END)
