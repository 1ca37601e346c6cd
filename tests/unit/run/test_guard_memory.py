"""Memory of the guard over the steps of a run, and what it forgets."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest

from megatron_dppo.errors import TrainingStopped
from megatron_dppo.policy.server_sums import ServerSums, TokenSource
from megatron_dppo.run.guard import GuardHistory
from tests.unit.run.test_guard import guard, sums_of

METRICS = {"abs_prob_diff": 1e-4}


def differing(size: float, tokens: int = 2000) -> ServerSums:
    """Tokens of probability 0.5 whose |pi - mu| is ``size`` in both directions."""
    return sums_of([math.log(0.5)] * tokens, [math.log(0.5 + (size if i % 2 else -size)) for i in range(tokens)])


def step(history: GuardHistory, sums: ServerSums, *, is_stale: bool) -> None:
    """Judge one step of the engine in this process, whose only problem can be an unusual difference."""
    check = replace(guard(on_policy=not is_stale), history=history)
    assert check(METRICS, {TokenSource("", is_stale): sums}) == {}


def passes(history: GuardHistory, sums: ServerSums, *, is_stale: bool) -> bool:
    """Return True if a step passes; the history stays as it is."""
    try:
        step(copy.deepcopy(history), sums, is_stale=is_stale)
    except TrainingStopped:
        return False
    return True


def test_a_spike_of_older_tokens_excuses_eight_steps_and_no_more() -> None:
    """Ten times the spike of 0.02 is 0.2; without it the limit is ten times 0.003."""
    history = GuardHistory()
    for size in (0.003, 0.02):
        step(history, differing(size), is_stale=True)
    for quiet in range(1, 12):
        step(history, differing(0.003), is_stale=True)
        assert passes(history, differing(0.15), is_stale=True) == (quiet <= 7), quiet
        assert passes(history, differing(0.028), is_stale=True)
        assert not passes(history, differing(0.25), is_stale=True)


def test_what_is_usual_is_the_median_of_the_last_32_steps() -> None:
    """After 40 noisy steps the run becomes quiet: 16 quiet steps leave the noise usual, 17 do not."""
    history = GuardHistory()
    for _ in range(40):
        step(history, differing(0.01), is_stale=False)
    for quiet in range(1, 40):
        step(history, differing(0.001), is_stale=False)
        assert passes(history, differing(0.025), is_stale=False) == (quiet < 17), quiet
        assert len(history.prob_diffs) <= 32 and passes(history, differing(0.0035), is_stale=False)


@pytest.mark.parametrize("is_stale", [False, True])
@pytest.mark.parametrize("tokens", [20, 50, 200])
def test_one_token_of_a_small_step_is_no_evidence(is_stale: bool, tokens: int) -> None:
    """One token with another expert moves the mean of 20 to 0.025, above every usual limit."""
    history = GuardHistory()
    for _ in range(3):
        step(history, differing(0.001), is_stale=is_stale)

    def with_far(count: int) -> ServerSums:
        return sums_of([math.log(0.5)] * tokens, [math.log(0.999)] * count + [math.log(0.5)] * (tokens - count))

    assert passes(history, with_far(0), is_stale=is_stale) and passes(history, with_far(1), is_stale=is_stale)
    assert tokens < 200 or not passes(history, with_far(tokens), is_stale=is_stale)
