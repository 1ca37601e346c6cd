"""Router replay on every layout: foreign routing equals a reference, own routing changes nothing, rows are counted.

CI takes a third of the layouts, ``make test-matrix`` all.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.distributed.layouts import ALLGATHER, CP, EP, EP4, ETP, FULL, OVERLAP, PP, SELECTIVE, TP, VPP
from tests.distributed.parity import Case
from tests.distributed.replay import run, write_references
from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.distributed

MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
LAYOUTS = {
    1: [
        Case(),
        Case(shared=True),
        Case(dense_layers=(2,)),
        Case(transformer=FULL),
        Case(transformer=MOE, dense_layers=(2,)),
        Case(transformer=BLOCK),
        Case(micro_batch_tokens=8),
        Case(family="deepseek_v3"),
        Case(family="gpt_oss"),
    ],
    2: [
        Case(TP, family="deepseek_v3"),
        Case(EP, transformer=FULL, family="glm4_moe"),
        Case(TP, family="glm4_moe_lite"),
        Case(TP),
        Case(TP, transformer=FULL, shared=True),
        Case(CP),
        Case(CP, transformer=MOE),
        Case(PP, transformer=FULL, tied=True),
        Case(PP, dense_layers=(2,)),
        Case(VPP),
        Case(VPP, transformer=FULL, micro_batch_tokens=16),
        Case(VPP, transformer={"pipeline_model_parallel_layout": "E|tt|t|tL"} | FULL),
        Case(VPP, transformer=MOE, dense_layers=(2,)),
        Case(EP),
        Case(EP, transformer=ALLGATHER | FULL),
        Case({}, transformer=SELECTIVE),
        Case(VPP, family="qwen3_5_moe_text"),
        Case(TP, family="qwen3_next"),
        Case({**TP, **EP}, family="gpt_oss"),
        Case(TP, family="minimax_m2"),
        Case(EP, family="olmoe"),
        Case(CP, family="mixtral"),
    ],
    4: [
        Case({**TP, **CP}, transformer=FULL),
        Case({**CP, **VPP}, transformer=FULL, dense_layers=(2,)),
        Case({**CP, **EP4}),
        Case({**TP, **ETP, **OVERLAP}, transformer=SELECTIVE),
        Case({**TP, **PP}, transformer=BLOCK),
        Case({**PP, **EP}, transformer=MOE, micro_batch_tokens=16),
        Case({**TP, **CP}, family="glm4_moe_lite"),
    ],
}
WEIGHTED = {
    1: [
        Case(),
        Case(shared=True),
        Case(transformer=MOE, dense_layers=(2,)),
        Case(transformer=BLOCK),
        Case(family="glm4_moe"),
        Case(family="olmoe"),
        Case(family="minimax_m2"),
        Case(family="gpt_oss"),
    ],
    2: [
        Case(CP),
        Case(TP, transformer=FULL, shared=True),
        Case(PP, dense_layers=(2,)),
        Case(VPP, transformer=FULL, micro_batch_tokens=16),
        Case({}, transformer=SELECTIVE),
        Case(EP, transformer=ALLGATHER | FULL),
        Case(TP, family="qwen3_next"),
        Case(CP, transformer=FULL, family="qwen3_5_moe_text"),
        Case(TP, family="deepseek_v3"),
        Case(EP, family="mixtral"),
    ],
    4: LAYOUTS[4],
}
COMPARED = {1: [Case(dense_layers=(2,))], 2: [Case(TP), Case(CP, transformer=FULL), Case(VPP, dense_layers=(2,))]}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the references of the models, which tests share."""
    return tmp_path_factory.mktemp("references")


@pytest.mark.parametrize("weights", [False, True], ids=["experts", "weights"])
@pytest.mark.parametrize("processes", sorted(LAYOUTS))
def test_replay_on_every_layout(processes: int, weights: bool, references: Path) -> None:
    cases = (WEIGHTED if weights else LAYOUTS)[processes]
    if not os.environ.get("EVERYTHING"):
        cases = cases[1::3]
    write_references(references, cases, weights=weights)
    run_distributed(run, processes, cases, references, "rollout", weights, timeout=600.0)


@pytest.mark.parametrize("processes", sorted(COMPARED))
def test_routes_that_are_compared_change_nothing(processes: int, references: Path) -> None:
    write_references(references, COMPARED[processes], weights=True)
    run_distributed(run, processes, COMPARED[processes], references, "compare", True, timeout=300.0)
