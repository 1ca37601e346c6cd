"""The guard over simulated servers: none that is honest is stopped, and lies are, with one URL and with several.

``python -m benchmarks.guard`` runs 10,000 honest runs and all lies.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.run.simulated_servers import (
    BF16,
    FP32,
    HONEST,
    LIES,
    Rounding,
    count_false_alarms,
    honest_pool,
    run_lie,
)

SLOW_IN_BF16 = ("responses of one prompt x .5", "first token x .2", "rounded to 2 digits")
"""Lies that bf16 does not show at once, or at all (docs/probe.md)."""


@pytest.mark.parametrize("rounding", HONEST, ids=lambda each: f"{each.dtype}-{each.size:g}-{each.heavy_fraction:g}")
def test_honest_servers_with_heavy_tails_are_never_stopped(rounding: Rounding) -> None:
    random = np.random.default_rng(1)
    pool = honest_pool(random, rounding, 100)
    for num_servers, runs in ((1, 10), (5, 4), (64, 1)):
        assert count_false_alarms(random, rounding, num_servers, pool, runs=runs, steps=10) == 0


@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize("lie", [lie for lie in LIES if lie not in SLOW_IN_BF16])
def test_lies_in_bf16_are_stopped_in_the_first_steps(lie: str, num_servers: int) -> None:
    stop = run_lie(LIES[lie], BF16, num_servers, seed=0, steps=3).step
    assert stop is not None


@pytest.mark.parametrize("lie", LIES)
def test_lies_in_fp32_are_stopped_at_once(lie: str) -> None:
    assert run_lie(LIES[lie], FP32, 1, seed=0, steps=1).step == 1


def test_a_lie_about_the_first_token_adds_up() -> None:
    stop = run_lie(LIES["first token x .2"], BF16, 1, seed=0).step
    assert stop is not None and stop > 1
