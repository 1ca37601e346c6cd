"""Adapters on the layouts: log-probabilities, every gradient, three updates, the merged export; the base is frozen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.layouts import ALLGATHER, CP, EP, EP4, ETP, FULL, OVERLAP, PP, SELECTIVE, TP, VPP
from tests.distributed.lora import ALL, load, run, save, write_references
from tests.distributed.parity import Case
from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.distributed
SOME = ("q_proj", "v_proj", "up_proj")
CASES = {
    1: [
        (Case(), ALL),
        (Case(transformer=FULL), ("down_proj",)),
        (Case(mixed=True), SOME),
        (Case(family="glm4_moe"), ALL),
    ],
    2: [
        (Case(TP), ALL),
        (Case(EP), ALL),
        (Case({**TP, "sequence_parallel": False}, dense=True, tied=True), ALL),
        (Case(TP, shared=True), ALL),
        (Case(EP, family="glm4_moe"), SOME),
        (Case(CP), ALL),
        (Case(PP, tied=True), ("k_proj", "o_proj")),
        (Case(VPP, transformer=FULL), ALL),
        (Case({"use_distributed_optimizer": False}), ALL),
        (Case({**EP, **OVERLAP}, transformer=ALLGATHER), SOME),
    ],
    4: [
        (Case({**TP, **ETP, **OVERLAP}, transformer=SELECTIVE), ALL),
        (Case(ETP), ALL),
        (Case({**TP, **PP}, mixed=True), SOME),
        (Case({**CP, **EP4}), ALL),
    ],
}


@pytest.mark.parametrize("processes", CASES)
def test_adapters_equal_transformers_in_float64(processes: int, tmp_path: Path) -> None:
    write_references(tmp_path, CASES[processes])
    run_distributed(run, processes, CASES[processes], tmp_path, timeout=400.0)


def test_checkpoints_of_adapters_continue_on_other_layouts(tmp_path: Path) -> None:
    write_references(tmp_path, [(Case(), ALL)])
    run_distributed(save, 2, {"tp": Case(TP), "ep": Case(EP)}, tmp_path)
    run_distributed(load, 2, [("tp", Case(PP))], tmp_path)
    run_distributed(load, 4, [("ep", Case(EP4)), ("ep", Case(ETP))], tmp_path)
