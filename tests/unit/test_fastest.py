"""Steps that stop their slowest groups: whose turn it is, what is carried, how old it is, what a resume loses."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Qwen3Config

from megatron_dppo.report.clock import Clock
from megatron_dppo.rollout.server_engine import ServerEngine
from megatron_dppo.run.stream.carried import Carried, Carry
from megatron_dppo.run.stream.sampling import Collected, collect_rollouts
from megatron_dppo.types import Completion, Prompt, SamplingParams
from tests.unit.configs import config
from tests.unit.fake_servers import END, FakeServer
from tests.unit.test_prefetch import FakeScorer, Stream, positions, steps
from tests.unit.test_server_engine import FakeTokenizer, publish


class Turtle:
    """Answers all groups but those at ``slow`` positions, which need as many calls as stand there."""

    def __init__(self, slow: dict[int, int]) -> None:
        self.policy_version, self.slow = -1, dict(slow)
        self.calls: list[list[int]] = []
        self.kept: dict[int, list[int]] = {}

    def generate_first(
        self,
        prompts: Sequence[Prompt],
        keys: Sequence[int],
        siblings: int,
        params: SamplingParams,
        enough: int,
        keep: Collection[int],
    ) -> list[list[Completion] | None]:
        assert [int(p.text) for p in prompts] == list(keys)
        self.calls.append(list(keys))
        found: list[list[Completion] | None] = []
        for key in keys:
            self.slow[key] = self.slow.get(key, 0) - 1
            self.kept.setdefault(key, []).append(self.policy_version)
            found.append(None if self.slow[key] >= 0 else [self._completion(key, params)] * siblings)
        assert sum(group is not None for group in found) >= enough
        self.kept = {key: versions for key, versions in self.kept.items() if key in keep}
        return found

    def _completion(self, key: int, params: SamplingParams) -> Completion:
        versions = self.kept[key]
        spans = tuple((version, 4 * i, 4 * i + 4) for i, version in enumerate(versions))
        return Completion(
            token_ids=(5,) * (4 * len(versions)),
            logprobs=(-1.0,) * (4 * len(versions)),
            finish_reason="stop",
            policy_version=max(versions),
            text="",
            policy_versions=spans,  # type: ignore[arg-type]
        )

    def update_weights(self, weights: object, version: int) -> None:
        self.policy_version = version


class Trainer:
    """Whose weights are served."""

    def __init__(self, engine: Any, dp_rank: int) -> None:
        self._engine, self.dp_rank = engine, dp_rank

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version


def run_with(engine: Any, carry: int, dp: int = 1, rank: int = 0, **rollout: Any) -> Any:
    sizes = {"prompts_per_step": 4 * dp, "samples_per_prompt": 2, "max_new_tokens": 400}
    extra = {"engine": "sglang", "abort_slowest": True, "partial_rollouts": carry, "oversample": 1.5}
    found = SimpleNamespace(
        config=config(run={"output_dir": "out", "num_steps": 6}, rollout=sizes | extra | rollout),
        inputs=SimpleNamespace(layout=SimpleNamespace(dp=dp), train_prompts=Stream()),
        trainer=Trainer(engine, rank),
        groups=SimpleNamespace(replica=None, dp=None),
        engine=engine,
        scorer=FakeScorer(lambda i: True),
        prefetch=SimpleNamespace(take=lambda step: None, missing=lambda *_: [], wait=lambda clock: None),
        step=0,
        cursor=0,
        carry=Carry(),
    )
    return found


def values(collected: Collected) -> dict[str, float]:
    return {name: metric.numerator / metric.denominator for name, metric in collected.metrics(1).items()}


def test_a_stopped_group_goes_first_in_the_next_step_and_new_prompts_fill_up() -> None:
    engine = Turtle({1: 1, 4: 1, 9: 2})
    run = run_with(engine, carry=2)
    collected = steps(run, 4)
    assert engine.calls == [[0, 1, 2, 3, 4, 5], [1, 4, 6, 7, 8, 9], [9, *range(10, 15)], [9, *range(15, 20)]]
    assert [positions(c) for c in collected] == [[0, 2, 3, 5], [1, 4, 6, 7], [10, 11, 12, 13], [9, 15, 16, 17]]
    assert run.cursor == 20, "every prompt is taken once"
    assert [c.num_carried for c in collected] == [2, 1, 1, 0]
    assert [sum(c.left_out.values()) for c in collected] == [0, 1, 1, 2]
    assert run.carry.groups == [[]]


def test_what_is_stopped_for_good_is_counted_as_given_up() -> None:
    found = [c.left_out for c in steps(run_with(Turtle({1: 1, 4: 1, 7: 3}), carry=0), 2)]
    assert found == [{"no_signal": 0, "surplus": 0, "given_up": 2}, {"no_signal": 0, "surplus": 1, "given_up": 1}]


def test_ages_are_those_of_the_tokens() -> None:
    collected = steps(run_with(Turtle({1: 2}), carry=3), 3)
    assert positions(collected[2])[0] == 1 and collected[2].ages == [2, 0, 0, 0]
    # 2 siblings, 4 tokens a step: 8 of age 2, 8 of age 1, and 4 groups of 8 of age 0.
    found = values(collected[2])
    assert found["policy_age"] == (8 * 2 + 8 * 1) / (8 + 8 + 4 * 8)
    assert found["policy_age_max"] == 2 and found["stale_fraction"] == 0.25
    assert [values(c)["policy_age"] for c in collected[:2]] == [0, 0]


def test_a_skipped_update_does_not_make_tokens_older() -> None:
    run = run_with(Turtle({1: 1}), carry=3)
    run.engine.update_weights(None, 0)
    for _ in range(2):
        collected = collect_rollouts(run, Clock())
        run.step += 1
    assert positions(collected)[0] == 1 and collected.ages == [0, 0, 0, 0], "the same weights"


@pytest.mark.parametrize(("limit", "asked"), [(0, 1), (1, 2), (2, 3)])
def test_a_group_is_carried_for_the_allowed_number_of_steps_and_then_thrown_away(limit: int, asked: int) -> None:
    engine = Turtle({3: 99})
    run = run_with(engine, carry=limit)
    collected = steps(run, 5)
    assert sum(3 in call for call in engine.calls) == asked
    assert all(3 not in positions(c) for c in collected)
    assert max(c.ages[0] for c in collected) == 0 and not engine.kept.get(3)
    assert len(run.carry.version_steps) == limit + 1


def test_refills_go_on_with_what_was_stopped() -> None:
    engine = Turtle({1: 1})
    run = run_with(engine, carry=1, dynamic_sampling=True)
    run.scorer = FakeScorer(lambda i: i not in (0, 2))
    (collected,) = steps(run, 1)
    # 6 at first, 5 of them complete, 3 of those with signal; for the 1 that lacks, the stopped one and a new one.
    assert engine.calls == [[0, 1, 2, 3, 4, 5], [1, 6]]
    assert positions(collected) == [3, 4, 5, 1] and run.cursor == 7


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_a_resume_loses_no_prompt_on_any_number_of_ranks(dp: int) -> None:
    run = run_with(Turtle({1: 9, 4: 9}), carry=3)
    steps(run, 1)
    saved = json.loads(json.dumps(run.carry.groups))
    carry = Carry()
    assert carry.restore(saved, dp) == 2
    assert sorted(group for of_rank in carry.groups for group in of_rank) == [(1, 0), (4, 0)]
    assert len(carry.groups) == dp
    assert all(isinstance(group, Carried) for of_rank in carry.groups for group in of_rank)
    if dp == 1:
        again = run_with(Turtle({}), carry=3)
        again.step, again.cursor, again.carry = run.step, run.cursor, carry
        assert positions(steps(again, 2)[0]) == [1, 4, 6, 7]
    assert Carry().restore([], dp) == 0


def test_ranks_take_new_prompts_one_after_the_other_whatever_each_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier, box = threading.Barrier(2), {}

    def from_each(value: Any, group: Any) -> list[Any]:
        rank = int(threading.current_thread().name)
        box[rank] = value
        barrier.wait(10)
        values = [box[0], box[1]]
        barrier.wait(10)
        return values

    monkeypatch.setattr("megatron_dppo.run.stream.fastest.from_each", from_each)
    runs = [run_with(Turtle({1: 1, 3: 1}), carry=2, dp=2, rank=rank) for rank in range(2)]
    found: dict[int, list[Collected]] = {}
    threads = [
        threading.Thread(target=lambda rank=rank: found.update({rank: steps(runs[rank], 3)}), name=str(rank))
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert runs[0].engine.calls == [list(range(6)), [1, 3, 12, 13, 14, 15], list(range(22, 28))]
    assert runs[1].engine.calls == [list(range(6, 12)), list(range(16, 22)), list(range(28, 34))]
    assert runs[0].cursor == runs[1].cursor == 34 and runs[0].carry.groups == runs[1].carry.groups == [[], []]
    assert positions(found[0][1]) == [1, 3, 12, 13]


def test_with_real_requests_every_prompt_of_the_stream_is_answered_in_some_step() -> None:
    """The engine, the pool and two fake servers whose weights change; prompts of odd number are slow."""
    servers = [FakeServer(f"http://s:{i}", token_seconds=0.002) for i in range(2)]
    for server in servers:
        server.sample = lambda request, position: END if position == (60 if request.token_ids[0] % 2 else 10) else 5
    engine = ServerEngine(servers, FakeTokenizer(), CONFIG, max_in_flight=64, health_seconds=1)  # type: ignore
    run = run_with(engine, carry=5)
    run.scorer = AllDiffer()
    seen: list[int] = []
    for step in range(6):
        publish(engine, servers, 10 * step)
        collected = collect_rollouts(run, Clock())
        for group, age in zip(collected.groups, collected.ages, strict=True):
            seen.append(group.prompt.token_ids[0])
            for rollout in group.rollouts:
                spans = rollout.completion.policy_versions
                assert len(rollout.completion.token_ids) == (59 if seen[-1] % 2 else 9)
                assert [spans[0].start, spans[-1].end] == [0, len(rollout.completion.token_ids)]
                assert [s.policy_version for s in spans] == sorted({s.policy_version for s in spans})
            assert age <= 5
        run.step += 1
    assert len(seen) == len(set(seen)) == 24 and any(i % 2 for i in seen)
    held = {group.position for group in run.carry.groups[0]}
    assert set(engine._unfinished) == held and not held & set(seen)
    engine.close()


class AllDiffer:
    def score(self, items: Sequence[Any]) -> list[Any]:
        return [SimpleNamespace(reward=float(i), failed=False, parts={}) for i, _ in enumerate(items)]


CONFIG = Qwen3Config(eos_token_id=END)
