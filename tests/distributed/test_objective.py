"""Every loss on every layout: the whole objective equals the float64 reference of one process."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.objective import VARIANTS, make_reference, run
from tests.distributed.parity import Case
from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.distributed

TP = {"tensor_model_parallel_size": 2}
PP = {"pipeline_model_parallel_size": 2}
VPP = {**PP, "virtual_pipeline_model_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}
CP = {"context_parallel_size": 2}
ALLGATHER = {"moe_token_dispatcher_type": "allgather"}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, bool], str]:
    """The file of the reference of each model: untied and tied, MoE and dense."""
    folder = tmp_path_factory.mktemp("references")
    files = {}
    for tied, dense in ((False, False), (True, False), (False, True)):
        reference = make_reference(Case(tied=tied, dense=dense), list(VARIANTS))
        file = folder / f"{tied}-{dense}.pt"
        torch.save(reference, file)
        files[tied, dense] = str(file)
    return files


def check(world_size: int, cases: list[Case], references: dict[tuple[bool, bool], str]) -> None:
    pairs = [(case, references[case.tied, case.dense]) for case in cases]
    run_distributed(run, world_size, pairs, list(VARIANTS), None, timeout=600.0)


def test_one_process(references: dict[tuple[bool, bool], str]) -> None:
    check(1, [Case(), Case(tied=True), Case(dense=True)], references)


def test_two_processes(references: dict[tuple[bool, bool], str]) -> None:
    cases = [
        Case(TP),
        Case(CP),
        Case(CP, dense=True),
        Case(PP, tied=True),
        Case(VPP),
        Case(EP),
        Case(EP, transformer=ALLGATHER),
        Case({}),
    ]
    check(2, cases, references)


def test_four_processes(references: dict[tuple[bool, bool], str]) -> None:
    cases = [Case({**TP, **CP}), Case({**CP, **PP}), Case({**TP, **EP}), Case({**CP, "expert_model_parallel_size": 4})]
    check(4, cases, references)
