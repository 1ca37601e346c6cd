"""Megatron on our layers equals transformers, for every layout, with several micro-batches of ragged packed sequences.

Not proven here: CUDA, Transformer Engine, bf16 (see tests/gpu).
"""

from __future__ import annotations

import pytest

from tests.distributed.parity import Case, run
from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.distributed

TP = {"tensor_model_parallel_size": 2}
PP = {"pipeline_model_parallel_size": 2}
CP = {"context_parallel_size": 2}
VPP = {**PP, "virtual_pipeline_model_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}


def test_one_process_equals_transformers() -> None:
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    selective = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe_act", "layernorm"]}
    cases = [Case(), Case(tied=True), Case(dense=True), Case(transformer=full), Case(transformer=selective)]
    cases += [Case(shared=True), Case(dense_layers=(2,))]
    run_distributed(run, 1, cases)


def test_two_processes_equal_transformers() -> None:
    cases = [
        Case(TP, tied=True),
        Case(TP, shared=True),
        Case(EP, shared=True),
        Case(CP),
        Case({**TP, "sequence_parallel": False}, dense=True, tied=True),
        Case(PP, dense=True, tied=True),
        Case(PP, dense_layers=(2,)),
        Case(PP, tied=True),
        Case(VPP, dense_layers=(2,)),
        Case({**TP, "expert_tensor_parallel_size": 2}, dense_layers=(2,)),
        Case({}),
        Case({"use_distributed_optimizer": False}),
        Case({"overlap_grad_reduce": True, "overlap_param_gather": True}),
    ]
    run_distributed(run, 2, cases)


# The cases above have these layouts with one thing more.
@pytest.mark.long
def test_two_processes_with_plain_models_equal_transformers() -> None:
    run_distributed(run, 2, [Case(TP), Case(TP, dense=True), Case(PP), Case(VPP), Case(EP)])


def test_uneven_pipelines_equal_transformers() -> None:
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    ends = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    cases = [
        Case(PP, transformer={"num_layers_in_first_pipeline_stage": 3}),
        Case(PP, tied=True, dense_layers=(0,), transformer={"num_layers_in_last_pipeline_stage": 3} | full),
        Case(PP, transformer={"pipeline_model_parallel_layout": "E|ttttL"} | full),
        Case(PP, dense=True, tied=True, transformer={"pipeline_model_parallel_layout": "Etttt|L"}),
        # Interleaved: 2 and 1, 1 and none; with embedding and loss as layers none, 1, 1 and 1, 1, none.
        Case(VPP, transformer={"pipeline_model_parallel_layout": "Ett|t|t|L"} | full),
        Case({**PP, "virtual_pipeline_model_parallel_size": 3}, transformer=ends),
        Case(PP, family="deepseek_v3", transformer={"num_layers_in_last_pipeline_stage": 1}),
    ]
    run_distributed(run, 2, cases)


def test_four_processes_equal_transformers() -> None:
    cases = [Case({**TP, **EP}), Case({**TP, **EP, "expert_tensor_parallel_size": 2}, tied=True), Case({**TP, **PP})]
    run_distributed(run, 4, cases)
