"""Adapters on the layouts: log-probabilities, every gradient, updates, the merged export; the base is frozen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.layouts import ALLGATHER, CP, EP, EP4, ETP, FULL, OVERLAP, PP, SELECTIVE, TP, VPP
from tests.distributed.lora import (
    ALL,
    LATENT,
    LATENT_PLAIN_QUERY,
    LINEAR,
    MIXTRAL,
    MLP,
    Adapted,
    load,
    run,
    save,
    write_references,
)
from tests.distributed.parity import Case
from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.distributed
SOME = ("q_proj", "v_proj", "up_proj")
ATTENTION = ("q_proj", "o_proj")
DEEPSEEK = (*LATENT, *MLP)
MOONLIGHT = (*LATENT_PLAIN_QUERY, *MLP)
MLA_UP_PROJ = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
CASES: dict[int, list[Adapted]] = {
    1: [
        (Case(), ALL),
        (Case(family="glm4_moe"), ALL),
        (Case(family="qwen3_next"), LINEAR["qwen3_next"]),
    ],
    2: [
        (Case(EP), ALL),
        (Case(TP, shared=True), ALL),
        (Case(TP, family="deepseek_v3"), DEEPSEEK),
        (Case({**TP, **EP}, family="gpt_oss"), ATTENTION),
        (Case(TP, family="qwen3_5_moe_text"), LINEAR["qwen3_5_moe_text"]),
        (Case(CP), ALL),
        (Case(VPP, transformer=FULL), ALL),
    ],
    4: [
        (Case({**TP, **ETP, **OVERLAP}, transformer=SELECTIVE), ALL),
    ],
}
FURTHER: dict[int, list[Adapted]] = {
    1: [
        (Case(transformer=FULL), ("down_proj",)),
        (Case(dense_layers=(2,)), SOME),
        (Case(family="kimi_k2"), DEEPSEEK),
        (Case(transformer=FULL, family="moonlight"), MOONLIGHT),
        (Case(family="deepseek_v3"), ("kv_a_proj_with_mqa",)),
        (Case(transformer=SELECTIVE, family="mixtral"), MIXTRAL),
        (Case(family="mixtral"), ("w2",)),
        (Case(family="minimax_m2"), ("q_proj", "w3")),
        (Case(family="llama"), ALL),
        (Case(family="mistral"), ALL),
        (Case(family="qwen2"), ALL),
    ],
    2: [
        (Case(TP), ALL),
        (Case({**TP, "sequence_parallel": False}, dense=True, tied=True), ALL),
        (Case(EP, family="glm4_moe"), SOME),
        (Case(PP, tied=True), ("k_proj", "o_proj")),
        (Case(EP, family="minimax_m2"), MIXTRAL),
        (Case({**EP, **OVERLAP}, transformer=ALLGATHER), SOME),
        (Case({"use_distributed_optimizer": False}), ALL),
        (Case(EP, transformer=FULL, family="deepseek_v3"), DEEPSEEK),
        (Case(TP, transformer=MLA_UP_PROJ, family="deepseek_v3"), ("q_b_proj", "kv_b_proj")),
        (Case(CP, family="deepseek_v3"), DEEPSEEK),
        (Case(VPP, transformer=FULL, family="deepseek_v3"), LATENT),
        (Case(TP, family="moonlight"), MOONLIGHT),
        (Case(PP, family="kimi_k2"), DEEPSEEK),
        (Case(TP, family="glm4_moe_lite"), DEEPSEEK),
        (Case(CP, family="glm4_moe_lite"), LATENT),
        (Case({**EP, **OVERLAP}, transformer=ALLGATHER, family="glm4_moe_lite"), DEEPSEEK),
        (Case(TP, family="mixtral"), MIXTRAL),
        (Case(CP, family="mixtral"), MIXTRAL),
        (Case(VPP, transformer=FULL, family="mixtral"), ("w1", "w3")),
        (Case(TP, transformer=FULL, family="minimax_m2"), MIXTRAL),
        (Case(PP, family="minimax_m2"), MIXTRAL),
        (Case(TP, family="olmoe"), ALL),
        (Case(TP, family="llama"), ALL),
        (Case(VPP, transformer=FULL, family="llama"), SOME),
        (Case(CP, family="mistral"), ALL),
        (Case({**TP, "sequence_parallel": False}, family="mistral"), ALL),
        (Case(TP, family="qwen2"), ALL),
        (Case(PP, family="qwen2"), ALL),
        (Case(PP, transformer={"num_layers_in_first_pipeline_stage": 3}), ALL),
    ],
    4: [
        (Case({**TP, **PP}, dense_layers=(2,)), SOME),
        (Case(ETP), ALL),
        (Case({**CP, **EP4}), ALL),
        (Case({**TP, **ETP, **OVERLAP}, family="deepseek_v3"), DEEPSEEK),
        (Case({**TP, **CP}, family="glm4_moe_lite"), DEEPSEEK),
        (Case({**TP, **PP}, family="moonlight"), MOONLIGHT),
        (Case(ETP, family="mixtral"), MIXTRAL),
        (Case({**CP, **EP4}, family="minimax_m2"), MIXTRAL),
        (Case({**TP, **CP}, family="qwen2"), ALL),
    ],
}
"""Cases that only ``make test-long`` runs."""


@pytest.mark.parametrize("processes", CASES)
def test_adapters_equal_transformers_in_float64(processes: int, tmp_path: Path) -> None:
    write_references(tmp_path, CASES[processes])
    run_distributed(run, processes, CASES[processes], tmp_path, timeout=400.0)


@pytest.mark.long
@pytest.mark.parametrize("processes", FURTHER)
def test_adapters_of_further_families_equal_transformers_in_float64(processes: int, tmp_path: Path) -> None:
    write_references(tmp_path, FURTHER[processes])
    run_distributed(run, processes, FURTHER[processes], tmp_path, timeout=1200.0)


def test_checkpoints_of_adapters_continue_on_other_layouts(tmp_path: Path) -> None:
    # The rows of one projection that tensor parallelism cuts in three sections.
    linear = ("in_proj_qkv", "in_proj_b", "out_proj")
    family = {"family": "qwen3_5_moe_text"}
    write_references(tmp_path, [(Case(), ALL), (Case(**family), linear)])
    saved = {"tp": (Case(TP), ALL), "ep": (Case(EP), ALL), "linear": (Case(TP, **family), linear)}
    run_distributed(save, 2, saved, tmp_path)
    run_distributed(load, 2, [("tp", (Case(PP), ALL)), ("linear", (Case(CP, **family), linear))], tmp_path)
    run_distributed(load, 4, [("ep", (Case(EP4), ALL)), ("ep", (Case(ETP), ALL))], tmp_path)


@pytest.mark.long
def test_checkpoints_of_latents_and_renamed_experts_continue_on_other_layouts(tmp_path: Path) -> None:
    latent, plain, mixtral = ({"family": name} for name in ("deepseek_v3", "moonlight", "minimax_m2"))
    write_references(tmp_path, [(Case(**latent), DEEPSEEK), (Case(**plain), MOONLIGHT), (Case(**mixtral), MIXTRAL)])
    saved = {
        "latent": (Case(TP, **latent), DEEPSEEK),
        "plain": (Case(CP, **plain), MOONLIGHT),
        "mixtral": (Case(EP, **mixtral), MIXTRAL),
    }
    run_distributed(save, 2, saved, tmp_path)
    loaded = [
        ("latent", (Case(PP, **latent), DEEPSEEK)),
        ("plain", (Case(TP, **plain), MOONLIGHT)),
        ("mixtral", (Case(CP, **mixtral), MIXTRAL)),
    ]
    run_distributed(load, 2, loaded, tmp_path)
    both = [("latent", (Case({**TP, **ETP}, **latent), DEEPSEEK)), ("mixtral", (Case(ETP, **mixtral), MIXTRAL))]
    run_distributed(load, 4, both, tmp_path)


def test_checkpoints_continue_where_parts_of_the_model_train_nothing(tmp_path: Path) -> None:
    # Megatron has one optimizer for dense weights and one for experts. Here one of them has no weight at all, or none
    # on rank 0, which writes the state that all ranks share.
    plain = {"use_distributed_optimizer": False}
    late = {"dense_layers": (0, 1)}
    write_references(tmp_path, [(Case(), MLP), (Case(), ATTENTION), (Case(**late), MLP)])
    saved = {
        "ep": (Case(EP), MLP),
        "tp": (Case(TP), MLP),
        "pp": (Case(PP), MLP),
        "ep_attention": (Case(EP), ATTENTION),
        "ep_plain": (Case({**EP, **plain}), MLP),
        "late": (Case({**PP}, **late), MLP),
        "late_plain": (Case({**PP, **plain}, **late), MLP),
    }
    run_distributed(save, 2, saved, tmp_path)
    loaded = [
        ("ep", (Case(PP), MLP)),
        ("tp", (Case(EP), MLP)),  # without expert parallelism Megatron has one optimizer for all weights
        ("pp", (Case(EP), MLP)),
        ("ep_attention", (Case(TP), ATTENTION)),
        ("ep_plain", (Case({**EP, **plain}), MLP)),
        ("late", (Case({**PP}, **late), MLP)),
        ("late", (Case(EP, **late), MLP)),
        ("late_plain", (Case({**PP, **plain}, **late), MLP)),
    ]
    run_distributed(load, 2, loaded, tmp_path)
    run_distributed(load, 4, [("ep", (Case(ETP), MLP)), ("late", (Case({**PP, **EP}, **late), MLP))], tmp_path)
