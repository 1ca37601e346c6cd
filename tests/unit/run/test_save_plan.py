"""End of a step: what is saved and why a run stops, over every combination of reasons."""

from __future__ import annotations

import itertools
from unittest.mock import MagicMock

import pytest

from megatron_dppo.errors import TrainingStopped
from megatron_dppo.process.stop_signal import Stopped, StopSignal
from megatron_dppo.process.time_limit import TimeLimit
from megatron_dppo.run.checkpoints import Checkpoints
from megatron_dppo.run.run_state import RunState
from megatron_dppo.run.save_plan import SavePlan
from tests.unit.configs import config

HEALTHY = {"rollout/reward_failed_fraction": 0.0}
FAILED = {"rollout/reward_failed_fraction": 0.75}


def decide(
    state: RunState,
    metrics: dict[str, float],
    *,
    by_number: bool = False,
    by_time: bool = False,
    by_signal: bool = False,
    out_of_time: bool = False,
    keep_best: bool = True,
) -> tuple[SavePlan, MagicMock]:
    checkpoints = MagicMock(spec=Checkpoints, save_seconds=2.0)
    checkpoints.is_due.return_value = by_number
    checkpoints.is_due_by_time.return_value = by_time
    limit = MagicMock(spec=TimeLimit)
    limit.leaves_no_step.return_value = out_of_time
    stop = MagicMock(spec=StopSignal, exit_code=0)
    stop.name = "SIGTERM"
    stop.requested.side_effect = lambda: by_signal or stop.request_by_time_limit.called
    settings = config(
        run={"num_steps": 5},
        rollout={"prompts_per_step": 4, "samples_per_prompt": 4},
        train={"max_skipped_updates": 3},
        data={"eval": "eval.jsonl"},
        eval={"every": 1},
        checkpoint={"keep_best": keep_best},
    )
    return SavePlan.decide(settings, state, metrics, checkpoints, limit, stop), stop


@pytest.mark.parametrize(
    ("stuck", "failed", "signal", "by_number", "by_time"), itertools.product([False, True], repeat=5)
)
def test_the_gravest_reason_stops_the_run_and_every_reason_is_saved(
    stuck: bool, failed: bool, signal: bool, by_number: bool, by_time: bool
) -> None:
    state = RunState(step=2, skipped_in_a_row=3 if stuck else 2)
    metrics = FAILED if failed else HEALTHY
    plan, _ = decide(state, metrics, by_number=by_number, by_time=by_time, by_signal=signal)
    text = str(plan.reason_to_stop or "")
    if stuck:
        assert isinstance(plan.reason_to_stop, TrainingStopped) and "3 updates in a row" in text
    elif failed:
        assert isinstance(plan.reason_to_stop, TrainingStopped) and "75% of the rewards of step 2" in text
    elif signal:
        assert isinstance(plan.reason_to_stop, Stopped) and "by SIGTERM after step 2" in text
    else:
        assert plan.reason_to_stop is None
    assert plan.is_due == (stuck or failed or signal or by_number) and plan.is_due_by_time == by_time


@pytest.mark.parametrize("keep_best", [True, False])
def test_the_best_accuracy_is_noted_always_and_saved_where_it_is_kept(keep_best: bool) -> None:
    state = RunState(step=3, best=(0.5, 1))
    for accuracy, best, is_due in ((0.4, (0.5, 1), False), (0.5, (0.5, 1), False), (0.6, (0.6, 3), keep_best)):
        plan, _ = decide(state, HEALTHY | {"eval/accuracy": accuracy}, keep_best=keep_best)
        assert state.best == best and plan.is_due == is_due
    assert decide(state, HEALTHY)[0] == SavePlan(is_due=False, is_due_by_time=False, reason_to_stop=None)


def test_the_time_limit_stops_before_a_step_and_never_after_the_last_one() -> None:
    plan, stop = decide(RunState(step=4), HEALTHY, out_of_time=True)
    assert isinstance(plan.reason_to_stop, Stopped) and plan.is_due and stop.request_by_time_limit.called
    plan, stop = decide(RunState(step=5), HEALTHY, out_of_time=True)
    assert plan.reason_to_stop is None and not stop.request_by_time_limit.called
