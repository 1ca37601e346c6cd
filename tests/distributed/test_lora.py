"""Adapters on the layouts: log-probabilities, every gradient, three updates, the merged export; the base is frozen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.layouts import ALLGATHER, CP, EP, EP4, ETP, FULL, OVERLAP, PP, SELECTIVE, TP, VPP
from tests.distributed.lora import ALL, LINEAR, load, run, save, write_references
from tests.distributed.parity import Case
from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.distributed
SOME = ("q_proj", "v_proj", "up_proj")
EXPERTS = ("gate_proj", "up_proj", "down_proj")
ATTENTION = ("q_proj", "o_proj")
CASES = {
    1: [
        (Case(), ALL),
        (Case(transformer=FULL), ("down_proj",)),
        (Case(dense_layers=(2,)), SOME),
        (Case(family="glm4_moe"), ALL),
        (Case(family="qwen3_next"), LINEAR["qwen3_next"]),
    ],
    2: [
        (Case(TP), ALL),
        (Case(EP), ALL),
        (Case({**TP, "sequence_parallel": False}, dense=True, tied=True), ALL),
        (Case(TP, shared=True), ALL),
        (Case(EP, family="glm4_moe"), SOME),
        (Case(TP, family="olmoe"), ALL),
        (Case(TP, family="mixtral"), ATTENTION),
        (Case({**TP, **EP}, family="gpt_oss"), ATTENTION),
        (Case(TP, family="qwen3_5_moe_text"), LINEAR["qwen3_5_moe_text"]),
        (Case(CP), ALL),
        (Case(PP, tied=True), ("k_proj", "o_proj")),
        (Case(VPP, transformer=FULL), ALL),
        (Case(PP, transformer={"num_layers_in_first_pipeline_stage": 3}), ALL),
        (Case({"use_distributed_optimizer": False}), ALL),
        (Case({**EP, **OVERLAP}, transformer=ALLGATHER), SOME),
    ],
    4: [
        (Case({**TP, **ETP, **OVERLAP}, transformer=SELECTIVE), ALL),
        (Case(ETP), ALL),
        (Case({**TP, **PP}, dense_layers=(2,)), SOME),
        (Case({**CP, **EP4}), ALL),
    ],
}


@pytest.mark.parametrize("processes", CASES)
def test_adapters_equal_transformers_in_float64(processes: int, tmp_path: Path) -> None:
    write_references(tmp_path, CASES[processes])
    run_distributed(run, processes, CASES[processes], tmp_path, timeout=400.0)


def test_checkpoints_of_adapters_continue_on_other_layouts(tmp_path: Path) -> None:
    # The rows of one projection that tensor parallelism cuts in three sections.
    linear = ("in_proj_qkv", "in_proj_b", "out_proj")
    family = {"family": "qwen3_5_moe_text"}
    write_references(tmp_path, [(Case(), ALL), (Case(**family), linear)])
    saved = {"tp": (Case(TP), ALL), "ep": (Case(EP), ALL), "linear": (Case(TP, **family), linear)}
    run_distributed(save, 2, saved, tmp_path)
    run_distributed(load, 2, [("tp", (Case(PP), ALL)), ("linear", (Case(CP, **family), linear))], tmp_path)
    run_distributed(load, 4, [("ep", (Case(EP4), ALL)), ("ep", (Case(ETP), ALL))], tmp_path)


def test_checkpoints_continue_where_parts_of_the_model_train_nothing(tmp_path: Path) -> None:
    # Megatron has one optimizer for dense weights and one for experts. Here one of them has no weight at all, or none
    # on rank 0, which writes the state that all ranks share.
    plain = {"use_distributed_optimizer": False}
    late = {"dense_layers": (0, 1)}
    write_references(tmp_path, [(Case(), EXPERTS), (Case(), ATTENTION), (Case(**late), EXPERTS)])
    saved = {
        "ep": (Case(EP), EXPERTS),
        "tp": (Case(TP), EXPERTS),
        "pp": (Case(PP), EXPERTS),
        "ep_attention": (Case(EP), ATTENTION),
        "ep_plain": (Case({**EP, **plain}), EXPERTS),
        "late": (Case({**PP}, **late), EXPERTS),
        "late_plain": (Case({**PP, **plain}, **late), EXPERTS),
    }
    run_distributed(save, 2, saved, tmp_path)
    loaded = [
        ("ep", (Case(PP), EXPERTS)),
        ("tp", (Case(EP), EXPERTS)),  # without expert parallelism Megatron has one optimizer for all weights
        ("pp", (Case(EP), EXPERTS)),
        ("ep_attention", (Case(TP), ATTENTION)),
        ("ep_plain", (Case({**EP, **plain}), EXPERTS)),
        ("late", (Case({**PP}, **late), EXPERTS)),
        ("late", (Case(EP, **late), EXPERTS)),
        ("late_plain", (Case({**PP, **plain}, **late), EXPERTS)),
    ]
    run_distributed(load, 2, loaded, tmp_path)
    run_distributed(load, 4, [("ep", (Case(ETP), EXPERTS)), ("late", (Case({**PP, **EP}, **late), EXPERTS))], tmp_path)
