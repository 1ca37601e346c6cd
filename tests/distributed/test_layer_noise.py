"""Noise on the layers' inputs: the same on every layout, with right gradients, and in updates alone."""

from __future__ import annotations

import pytest

from tests.distributed.layer_noise import half, run
from tests.distributed.layouts import CP, EP, ETP, FULL, OVERLAP, PP, SELECTIVE, TP, VPP
from tests.distributed.parity import Case
from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.distributed
CASES = {
    1: [Case(), Case(transformer=FULL), Case(micro_batch_tokens=8)],
    2: [
        Case(TP),
        Case(CP),
        Case(PP, tied=True),
        Case(VPP, transformer=FULL),
        Case(EP),
        Case({**TP, "sequence_parallel": False}, dense=True),
        Case({}, dense=True),
    ],
    4: [Case({**TP, **CP}), Case({**TP, **ETP, **OVERLAP}, transformer=SELECTIVE), Case({**CP, **PP})],
}
SAMPLED = {1: 3, 2: 4, 4: 1}
"""Number of cases that CI takes; ``make test-long`` takes all."""


@pytest.mark.parametrize("processes", CASES)
def test_noise_equals_transformers_in_float64(processes: int) -> None:
    run_distributed(run, processes, CASES[processes][: SAMPLED[processes]], timeout=400.0)


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, 4])
def test_noise_equals_transformers_in_float64_on_further_layouts(processes: int) -> None:
    run_distributed(run, processes, CASES[processes][SAMPLED[processes] :], timeout=400.0)


def test_the_loss_scale_is_taken_out() -> None:
    run_distributed(half, 2)
