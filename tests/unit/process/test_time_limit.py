"""When a run stops before its job's time limit: by the steps that it has measured, whatever they take."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megatron_dppo.errors import ConfigError
from megatron_dppo.process.time_limit import TimeLimit


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def steps_done(
    end: float | None,
    seconds: Sequence[float],
    *,
    save: float = 10.0,
    is_save_measured: bool = True,
    evaluations: Sequence[int] = (),
) -> tuple[int, float]:
    """Take steps of the given seconds, evaluations included, and save after each.

    Returns the steps that were done and the time at the end of the last save.
    """
    clock = Clock()
    limit = TimeLimit(end, clock)
    for step, duration in enumerate(seconds, start=1):
        with limit.step(evaluates=step in evaluations):
            clock.now += duration
            stops = limit.leaves_no_step(
                save_seconds=save if is_save_measured else None, evaluates_next=step + 1 in evaluations
            )
            clock.now += save
        if stops:
            return step, clock.now
    return len(seconds), clock.now


def test_a_run_takes_every_step_that_fits_and_saves_before_the_limit() -> None:
    # A step and its save take 110 s. The next one is given 1.2 * 110 + 10 s after this save: 142 s.
    assert steps_done(None, [100.0] * 9)[0] == 9
    assert steps_done(1000 + 220 + 142, [100.0] * 9) == (3, 1330.0)
    assert steps_done(1000 + 220 + 141, [100.0] * 9) == (2, 1220.0)
    # A signal 600 s before the limit could not save a step of 1,389 s.
    done, end = steps_done(1000 + 24 * 3600, [1389.0] * 100, save=54.0)
    assert 1000 + 24 * 3600 - 2 * 1500 < end <= 1000 + 24 * 3600 and done == 59
    # The longest step counts, and at most a fifth more.
    assert steps_done(1000 + 500, [100.0, 50.0, 50.0, 50.0, 50.0, 50.0], save=0.0) == (6, 1350.0)
    assert steps_done(1000 + 319, [100.0, 50.0, 50.0, 50.0], save=0.0) == (3, 1200.0)


def test_what_was_not_measured_may_take_as_long_as_a_step() -> None:
    # Without a measured save: 1.2 + 2 steps must be left after the first.
    assert steps_done(1000 + 100 + 320, [100.0] * 2, save=0.0, is_save_measured=False)[0] == 2
    assert steps_done(1000 + 100 + 319, [100.0] * 2, save=0.0, is_save_measured=False)[0] == 1
    # An evaluation in the next step: 2.2 steps. One that was measured is part of the longest step.
    assert steps_done(1000 + 100 + 220, [100.0] * 2, save=0.0, evaluations=[2])[0] == 2
    assert steps_done(1000 + 100 + 219, [100.0] * 2, save=0.0, evaluations=[2])[0] == 1
    assert steps_done(1000 + 150 + 180, [150.0, 100.0], save=0.0, evaluations=[1, 2])[0] == 1
    assert steps_done(1000 + 250 + 180, [150.0, 100.0, 100.0], save=0.0, evaluations=[1, 3])[0] == 3
    # The limit has passed already: the step that is done is saved.
    assert steps_done(1.0, [100.0] * 2)[0] == 1


def test_the_variable_is_seconds_since_1970() -> None:
    assert not TimeLimit.from_environment({}).leaves_no_step(save_seconds=0.0, evaluates_next=False)
    assert not TimeLimit.from_environment({"MEGATRON_DPPO_END_TIME": ""}).leaves_no_step(
        save_seconds=0.0, evaluates_next=False
    )
    assert TimeLimit.from_environment({"MEGATRON_DPPO_END_TIME": "1764150000.5"}).leaves_no_step(
        save_seconds=0.0, evaluates_next=False
    )
    for text in ("12:00", "nan", "inf", "-5"):
        with pytest.raises(ConfigError, match=f"MEGATRON_DPPO_END_TIME = '{text}': expected seconds since 1970"):
            TimeLimit.from_environment({"MEGATRON_DPPO_END_TIME": text})
