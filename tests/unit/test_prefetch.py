"""Which weights sample which batch, what a failure in the background does, and how a step's groups are chosen."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_dppo.errors import CheckpointError, ConfigError
from megatron_dppo.report.clock import Clock
from megatron_dppo.rollout.store import load_groups, save_groups
from megatron_dppo.run.stream.prefetch import (
    Batch,
    Prefetch,
    describe_batches,
    load_batches,
    save_batches,
    why_unusable,
)
from megatron_dppo.run.stream.sampling import Collected, choose, collect_rollouts, oversampled
from megatron_dppo.types import Completion, Prompt, Rollout, RolloutGroup, SamplingParams
from tests.unit.configs import config

CPU = torch.device("cpu")


class Stream:
    """An endless stream of prompts whose text is their position."""

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(prompt_id=f"row:{index}", text=str(index), token_ids=(index, 1), label="")


class FakeEngine:
    """Answers with the seed; notices new weights in the middle of a generation."""

    def __init__(self) -> None:
        self.policy_version, self.busy = -1, False
        self.threads: set[str] = set()

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        self.busy, version = True, self.policy_version
        self.threads.add(threading.current_thread().name)
        threading.Event().wait(0.002)
        found = [
            Completion(
                token_ids=(params.seed, i),
                logprobs=(-0.1, -math.inf),
                finish_reason="stop",
                policy_version=self.policy_version,
                text=p.text,
            )
            for i, p in enumerate(prompts)
        ]
        assert self.policy_version == version, "new weights in the middle of a generation"
        self.busy = False
        return found

    def update_weights(self, weights: object, version: int) -> None:
        assert not self.busy, "the engine samples and gets new weights"
        self.policy_version = version


class FakeScorer:
    """Groups of the prompts for which ``has_signal`` says so get two different rewards."""

    def __init__(self, has_signal: Callable[[int], bool]) -> None:
        self._has_signal = has_signal

    def score(self, items: Sequence[Any]) -> list[Any]:
        return [
            SimpleNamespace(reward=float(i % 2 if self._has_signal(int(item.prompt)) else 0), failed=False, parts={})
            for i, item in enumerate(items)
        ]


def session(max_staleness: int, has_signal: Callable[[int], bool] = lambda i: True, **rollout: Any) -> Any:
    """What ``collect_rollouts`` needs of a run in one process."""
    sizes = {"prompts_per_step": 4, "samples_per_prompt": 2, "max_new_tokens": 4}
    return SimpleNamespace(
        config=config(
            run={"output_dir": "out", "num_steps": 6}, train={"max_staleness": max_staleness}, rollout=sizes | rollout
        ),
        inputs=SimpleNamespace(layout=SimpleNamespace(dp=1), train_prompts=Stream()),
        trainer=SimpleNamespace(dp_rank=0),
        groups=SimpleNamespace(replica=None, dp=None),
        engine=FakeEngine(),
        scorer=FakeScorer(has_signal),
        prefetch=Prefetch(max_staleness, CPU),
        step=0,
        cursor=0,
    )


def steps(run: Any, until: int = 6) -> list[Collected]:
    """The loop without training: the version of the weights is the number of steps done."""
    run.engine.update_weights(None, run.step)
    collected = []
    while run.step < until:
        collected.append(collect_rollouts(run, Clock()))
        run.prefetch.wait(Clock())
        run.step += 1
        run.engine.update_weights(None, run.step)
    return collected


def versions(collected: Collected) -> list[int]:
    return [group.rollouts[0].completion.policy_version for group in collected.groups]


def positions(collected: Collected) -> list[int]:
    return [int(group.prompt.text) for group in collected.groups]


@pytest.mark.parametrize(
    ("max_staleness", "expected"), [(0, [0, 1, 2, 3, 4, 5]), (1, [0, 0, 1, 2, 3, 4]), (2, [0, 0, 0, 1, 2, 3])]
)
def test_batch_b_is_sampled_with_the_weights_of_step_b_minus_max_staleness(
    max_staleness: int, expected: list[int]
) -> None:
    run = session(max_staleness)
    collected = steps(run)
    assert [versions(c) for c in collected] == [[v] * 4 for v in expected]
    assert [c.ages for c in collected] == [[step - v] * 4 for step, v in enumerate(expected)]
    assert max(age for c in collected for age in c.ages) == max_staleness
    assert [positions(c) for c in collected] == [list(range(4 * s, 4 * s + 4)) for s in range(6)]
    assert run.cursor == 24, "nothing is sampled past the last step"
    assert len(run.engine.threads) == 1 + (max_staleness > 0)


def test_prompts_and_seeds_of_a_batch_do_not_depend_on_max_staleness() -> None:
    tokens = [
        [[r.completion.token_ids for g in c.groups for r in g.rollouts] for c in steps(session(n))] for n in (0, 1, 2)
    ]
    assert tokens[0] == tokens[1] == tokens[2]
    assert len({batch[0][0] for batch in tokens[0]}) == 6, "each step has a seed of its own"


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_a_run_restored_from_its_checkpoint_goes_on_as_if_it_had_not_stopped(
    max_staleness: int, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"dynamic_sampling": True, "oversample": 1.5}
    expected = steps(session(max_staleness, lambda i: i % 3 > 0, **settings))
    first = session(max_staleness, lambda i: i % 3 > 0, **settings)
    assert steps(first, 3) == expected[:3]
    described = describe_batches(first.prefetch.ready(), 1)
    save_batches(first.prefetch.ready(), 0, tmp_path)
    second = session(max_staleness, lambda i: i % 3 > 0, **settings)
    second.step, second.cursor = first.step, first.cursor
    second.prefetch.restore(load_batches(described, 0, tmp_path, second.inputs.train_prompts.__getitem__))
    assert steps(second) == expected[3:]


def test_a_failure_in_the_background_is_raised_as_it_was_before_the_weights_change() -> None:
    run = session(1, lambda i: 1 / (i < 8))
    run.engine.update_weights(None, 0)
    collect_rollouts(run, Clock())
    run.prefetch.wait(Clock())
    run.step = 1
    collect_rollouts(run, Clock())
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        run.prefetch.wait(Clock())
    run.prefetch.close()


def test_close_waits_for_what_runs_and_forgets_its_failure() -> None:
    prefetch, started, go = Prefetch(2, CPU), threading.Event(), threading.Event()
    done = []

    def work() -> list[RolloutGroup]:
        started.set()
        go.wait(10)
        done.append(1)
        raise RuntimeError("nobody is there to hear this")

    for step in (1, 2):
        prefetch.start(Batch(step=step, sampled_at=0, cursor=0, prompts_per_rank=1), work)
    started.wait(10)
    threading.Timer(0.05, go.set).start()
    prefetch.close()
    assert done == [1], "the running one ends, the waiting one never starts"


def test_refills_of_an_old_batch_are_sampled_with_the_current_weights() -> None:
    run = session(1, lambda i: i != 5, dynamic_sampling=True)
    collected = steps(run, 3)
    assert positions(collected[0]) == [0, 1, 2, 3]
    assert (positions(collected[1]), versions(collected[1])) == ([4, 6, 7, 8], [0, 0, 0, 1])
    assert collected[1].ages == [1, 1, 1, 0] and collected[1].left_out == {"no_signal": 1, "surplus": 0, "given_up": 0}
    values = {name: metric.numerator / metric.denominator for name, metric in collected[1].metrics(1).items()}
    assert values.pop("carried_groups") == 0
    left_out = {"left_out/no_signal": 1, "left_out/surplus": 0, "left_out/given_up": 0}
    assert values == {"policy_age": 0.75, "policy_age_max": 1, "stale_fraction": 0.75, **left_out}


def test_oversampling_keeps_the_first_groups_with_signal_in_the_order_of_the_prompts() -> None:
    run = session(0, lambda i: i % 2 == 1, oversample=2)
    collected = steps(run, 2)
    assert [positions(c) for c in collected] == [[1, 3, 5, 7], [9, 11, 13, 15]]
    assert [c.left_out["no_signal"] for c in collected] == [4, 4] and run.cursor == 16
    few = steps(session(0, lambda i: i == 2, oversample=1.5), 1)[0]
    assert positions(few) == [2, 3, 4, 5], "too few with signal: the step keeps its size"
    refilled = session(0, lambda i: i > 5, oversample=1.5, dynamic_sampling=True)
    assert positions(steps(refilled, 1)[0]) == [6, 7, 8, 9]
    assert refilled.cursor == 12, "6 for the step, and 6 more for the 4 that were missing"


def test_choose_never_prefers_a_flat_group() -> None:
    assert choose([True, False, True, True], 2) == [0, 2]
    assert choose([False, True, False, False], 3) == [1, 2, 3]
    assert choose([False, False], 2) == [0, 1]
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


def test_saved_rollouts_are_unusable_after_a_change_that_concerns_them() -> None:
    described = {"dp": 2, "batches": [{"step": 4, "sampled_at": 3, "cursor": 12, "prompts_per_rank": 2}]}
    was = config(train={"max_staleness": 1})
    plain = was.model_dump(mode="json")
    assert why_unusable(described, plain, was, 2) == ""
    assert "was 2 and is 1" in why_unusable(described, plain, was, 1)
    assert "max_staleness = 0" in why_unusable(described, plain, config(), 2)
    hotter = config(train={"max_staleness": 1}, rollout={"temperature": 0.9})
    assert "[rollout]" in why_unusable(described, plain, hotter, 2)


def group(index: int, rewards: Sequence[float]) -> RolloutGroup:
    prompt = Stream()[index]
    completion = Completion(
        token_ids=(3, 2**40), logprobs=(-1 / 3, -math.inf), finish_reason="length", policy_version=7, text='é"\n'
    )
    none = Completion(token_ids=(), logprobs=None, finish_reason="stop", policy_version=7, text="")
    rollouts = [
        Rollout(prompt=prompt, completion=c, reward=r, reward_failed=r < 0)
        for c, r in zip((completion, none), rewards, strict=True)
    ]
    return RolloutGroup(prompt=prompt, rollouts=tuple(rollouts))


def test_rollouts_come_back_from_a_file_as_they_were(tmp_path: Path) -> None:
    groups = [group(0, (0.1, -1.0)), group(1, (1e-300, 0.0))]
    save_groups(tmp_path / "a", groups)
    assert load_groups(tmp_path / "a", [Stream()[0], Stream()[1]]) == groups
    save_groups(tmp_path / "empty", [])
    assert load_groups(tmp_path / "empty", []) == []


def test_tables_of_numbers_and_tensors_in_any_field_come_back_too(tmp_path: Path) -> None:
    """A dataclass takes any value: stands for the fields that a completion may get."""
    table = ((1.5, -math.inf), (0.1, 2.0))
    ragged = ((1,), (1, 2))
    for value in (table, ragged, ((True, False),), {"a": (1, 2.5), "b": None}, ("x", 1)):
        changed = group(0, (0.0, 1.0))
        object.__setattr__(changed.rollouts[0].completion, "logprobs", value)
        save_groups(tmp_path / "a", [changed])
        assert load_groups(tmp_path / "a", [Stream()[0]]) == [changed]
    changed = group(0, (0.0, 1.0))
    object.__setattr__(changed.rollouts[0].completion, "logprobs", torch.arange(6).reshape(2, 3).T)
    save_groups(tmp_path / "a", [changed])
    (loaded,) = load_groups(tmp_path / "a", [Stream()[0]])
    assert torch.equal(torch.as_tensor(loaded.rollouts[0].completion.logprobs), torch.arange(6).reshape(2, 3).T)
    object.__setattr__(changed.rollouts[0].completion, "logprobs", {1, 2})
    with pytest.raises(TypeError, match="holds a set"):
        save_groups(tmp_path / "a", [changed])


def test_a_damaged_file_and_other_data_are_named(tmp_path: Path) -> None:
    save_groups(tmp_path / "a", [group(0, (0.0, 1.0))])
    with pytest.raises(CheckpointError, match="prompt row:0 where the data now has row:1"):
        load_groups(tmp_path / "a", [Stream()[1]])
    with pytest.raises(CheckpointError, match="holds 1 groups, expected 2"):
        load_groups(tmp_path / "a", [Stream()[0], Stream()[1]])
    (tmp_path / "b").write_bytes((tmp_path / "a").read_bytes()[:-5])
    for name in ("b", "absent"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_groups(tmp_path / name, [Stream()[0]])
