"""State that the guard keeps over a run, and the servers that leave it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from columns import ids, logs
from megatron_dppo.errors import TrainingStopped
from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.rollout.batch import CollectedRollouts
from megatron_dppo.rollout.repeats import RepeatSums
from megatron_dppo.run.guard_state import GuardState
from megatron_dppo.types import Completion, DropReason, FinishReason, Prompt, Rollout, RolloutGroup
from megatron_dppo_engines.sampling_sums import RankSums
from tests.unit.configs import config

GREEDY = RankSums(tokens=5000.0, shift=-1000.0, variance=250.0, best=5000.0, best_expected=3000.0)
HONEST = RankSums(tokens=5000.0, shift=3.0, variance=250.0, best=3010.0, best_expected=3000.0)
SERVERS = {"rollout": {"engine": "sglang", "servers": {"urls": ["http://a", "http://b"]}}}


def collected(reason: FinishReason = FinishReason.STOP, **more: Any) -> CollectedRollouts:
    prompt = Prompt(prompt_id="p", text="p", token_ids=(1,), label="")
    completion = Completion(token_ids=ids([1]), logprobs=logs([-1.0]), finish_reason=reason, policy_version=0, text="")
    group = RolloutGroup(prompt=prompt, rollouts=(Rollout(prompt=prompt, completion=completion, reward=0.0),))
    values: dict[str, Any] = {"dropped_groups": {}, "token_ages": {0: 1}} | more
    return CollectedRollouts(groups=[group], ages=[0], **values)


def new_state(**sections: Any) -> GuardState:
    settings = config(**sections)
    return GuardState.from_config(settings.rollout, settings.train)


def begin(state: GuardState, ranks: dict[str, RankSums], rollouts: CollectedRollouts | None = None) -> Any:
    return state.begin_step(config(**SERVERS), ParallelGroups(), rollouts or collected(), ranks)


def test_a_server_that_fails_the_test_leaves_the_run_once_and_the_last_one_stops_it() -> None:
    state = new_state(**SERVERS)
    guard = begin(state, {"http://a": HONEST, "http://b": GREEDY})
    found = state.take_excluded()
    assert guard.left_out == found, "a stop of this step names it, too"
    assert list(found) == ["http://b"] and "greedy decoding" in found["http://b"]
    assert begin(state, {"http://a": HONEST}).left_out == state.take_excluded() == {}
    with pytest.raises(TrainingStopped, match=r"http://a: greedy(.|\n)*train\.sampling_test = false"):
        begin(state, {"http://a": GREEDY})


def test_copies_of_the_engine_in_this_process_stop_the_run() -> None:
    repeats = {"": RepeatSums(responses=64.0, repeats=56.0, expected=1e-9)}
    with pytest.raises(TrainingStopped, match="copies: 56 of 64"):
        begin(new_state(), {}, collected(repeats=repeats))


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        # One old answer for all siblings: its tokens are more probable than samples, as behind a filter.
        (replace(GREEDY, best=4000.0), "copies: 56 of 64"),
        # Greedy decoding gives copies, too.
        (GREEDY, "greedy decoding"),
    ],
    ids=["copies", "greedy"],
)
def test_of_two_alarms_the_one_that_explains_the_other_is_told(ranks: RankSums, words: str) -> None:
    state = new_state(**SERVERS)
    repeats = {"http://a": RepeatSums(responses=64.0, repeats=56.0, expected=1e-9)}
    begin(state, {"http://a": ranks, "http://b": HONEST}, collected(repeats=repeats))
    assert state.excluded["http://a"].startswith(words)


def test_checkpoints_without_evidence_by_server_load() -> None:
    state = new_state(**SERVERS)
    older = state.to_json()
    del older["server_evidence"]
    state.restore(older | {"prob_diffs": [0.001]})
    assert state.history.usual == 0.001 and state.history.evidence.limit > 10


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"sampling_test": False}},
        {"train": {"layer_noise": {"std": 0.1}}},
        {"rollout": {"perturbation": {"router_noise": 0.1}}},
        {"rollout": {"top_p": 0.9}},
    ],
    ids=["off", "layer noise", "perturbation", "filters"],
)
def test_sampling_is_not_tested_where_it_cannot_be(sections: dict[str, Any]) -> None:
    assert new_state(**sections).sampling is None


def test_the_state_survives_a_checkpoint_as_json() -> None:
    state = new_state(**SERVERS)
    state.history.prob_diffs += [0.001, 0.002]
    assert state.sampling is not None
    state.sampling.add_ranks({"http://a": HONEST, "http://b": RankSums(tokens=9.0, shift=-2.0, variance=1.0)})
    restored = new_state(**SERVERS)
    restored.restore(json.loads(json.dumps(state.to_json())))
    assert restored.to_json() == state.to_json() and restored.sampling is not None
    assert any(restored.sampling.evidence["http://b"]["rank_low"])


def test_what_is_left_out_is_counted_for_the_surprise() -> None:
    state = new_state(**SERVERS)
    half = collected(FinishReason.LENGTH, dropped_groups={DropReason.NO_SIGNAL: 1})
    guard = state.begin_step(config(**SERVERS, train={"mask_truncated": True}), ParallelGroups(), half, {})
    assert guard.selection.groups == 0.5 and guard.selection.responses == 1.0
    carried = state.begin_step(config(**SERVERS), ParallelGroups(), collected(num_carried=3), {})
    assert carried.selection.groups == 0.75
    whole = state.begin_step(config(**SERVERS), ParallelGroups(), collected(FinishReason.LENGTH), {})
    assert whole.selection.groups == whole.selection.responses == 0.0
