"""The probe's own numbers on every kind of layout."""

from __future__ import annotations

import pytest

from tests.distributed.layouts import ALLGATHER, CP, EP, PP, TP, VPP
from tests.distributed.parity import Case
from tests.distributed.readings import run
from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.distributed

LAYOUTS = {
    1: [Case(dense=True), Case(dense_layers=(2,), fused_head=False)],
    2: [
        Case(TP, tied=True, fused_head=False),
        Case(CP),
        Case(VPP, micro_batch_tokens=16),
        Case(EP, transformer=ALLGATHER),
    ],
    4: [Case({**TP, **PP})],
}


@pytest.mark.parametrize("processes", sorted(LAYOUTS))
def test_the_probe_computes_what_transformers_does(processes: int) -> None:
    run_distributed(run, processes, LAYOUTS[processes], timeout=400.0)
