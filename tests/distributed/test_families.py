"""Every family of models on every layout equals transformers in float64, and biases of routers are what they should be.

CI takes some of the grid, ``make test-long`` all.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.errors import CheckpointError
from megatron_dppo.hf.folder import DictWeights, model_shape, stream_model, weight_shapes
from megatron_dppo.losses import policy_objective
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.policy.update import Updater
from tests.distributed.families import TINY, family_config
from tests.distributed.layouts import ALLGATHER, CP, EP, EP4, ETP, FULL, OVERLAP, PP, SELECTIVE, TP, VPP
from tests.distributed.parity import LOSS, Case, build_trainer, config_for, hf_reference, run, samples
from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.distributed

Layouts = list[tuple[dict[str, Any], dict[str, Any]]]
CORE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm"]}
DENSE: dict[int, Layouts] = {
    1: [({}, {}), ({}, FULL), ({}, CORE)],
    2: [(TP, {}), ({**TP, "sequence_parallel": False}, {}), (CP, {}), (PP, {}), (VPP, {}), ({}, {}), (OVERLAP, {})],
    4: [({**TP, **CP}, {}), ({**CP, **PP}, {}), ({**TP, **PP}, FULL)],
}
EXPERTS: dict[int, Layouts] = {
    1: [({}, {}), ({}, FULL), ({}, SELECTIVE)],
    2: [
        (TP, {}),
        ({**TP, "expert_tensor_parallel_size": 2}, SELECTIVE),
        (CP, {}),
        (PP, {}),
        (VPP, FULL),
        (EP, {}),
        (EP, ALLGATHER),
        ({}, {}),
        ({"use_distributed_optimizer": False}, {}),
    ],
    4: [
        ({**TP, **CP}, {}),
        ({**CP, **PP}, FULL),
        ({**CP, **EP4}, {}),
        ({**TP, **ETP, **OVERLAP}, SELECTIVE),
        ({**TP, **PP, **EP}, {}),
        ({**CP, **VPP, **EP}, {}),
    ],
}
BORDERS: dict[str, Any] = {"lengths": (1, 63, 2, 64, 1, 65, 128, 33), "micro_batch_tokens": 140}
"""Rows of samples around the chunk of 64 tokens of the delta rule, and of one token."""
SAMPLED: dict[int, list[Case]] = {
    1: [
        Case(family="qwen2", tied=True),
        Case(family="moonlight"),
        Case(family="kimi_k2"),
        Case(family="mixtral_window"),
    ],
    2: [
        Case(TP, family="llama"),
        Case(VPP, family="llama", transformer=FULL),
        Case(EP, family="glm4_moe"),
        Case(PP, family="glm4_moe", tied=True),
        Case(TP, family="deepseek_v3"),
        Case(CP, family="deepseek_v3", transformer=SELECTIVE),
        Case(TP, family="olmoe"),
        Case(EP, family="mixtral", tied=True),
        Case(EP, family="glm4_moe_lite"),
        Case(TP, family="qwen3_next", **BORDERS),
        Case(PP, family="qwen3_next", transformer=FULL),
        Case(CP, family="qwen3_5_moe_text", transformer=SELECTIVE, **BORDERS),
        Case(TP, family="minimax_m2"),
        Case({**TP, **EP}, family="gpt_oss", transformer=SELECTIVE),
        Case(CP, family="gpt_oss", tied=True),
    ],
    4: [
        Case({**TP, **PP, **EP}, family="deepseek_v3"),
        Case({**TP, **ETP, **OVERLAP}, family="qwen3_5_moe_text", tied=True),
    ],
}


ALIKE = ("mistral", "mistral_window", "mixtral_window", "moonlight", "kimi_k2")
"""Models that several processes split like another one's."""


def without_expert_tensor_parallelism(parallel: dict[str, Any]) -> dict[str, Any]:
    """The layout with the experts spread over expert parallelism, which biases of experts need."""
    sizes = {key: value for key, value in parallel.items() if key != "expert_tensor_parallel_size"}
    return EP | sizes if "tensor_model_parallel_size" in sizes else sizes


def whole_grid(processes: int) -> list[Case]:
    """Every family on every layout of so many processes."""
    cases = []
    for family in TINY:
        shape = model_shape(family_config(family))
        layouts = (DENSE if shape.num_experts is None else EXPERTS)[processes]
        if shape.has_linear_bias:
            layouts = [(without_expert_tensor_parallelism(parallel), transformer) for parallel, transformer in layouts]
        for parallel, transformer in layouts[:1] if processes > 1 and family in ALIKE else layouts:
            cases.append(Case(parallel, family=family, transformer=transformer, tied=len(cases) % 5 == 0))
    return cases


@pytest.mark.parametrize("processes", sorted(SAMPLED))
def test_families_equal_transformers(processes: int) -> None:
    run_distributed(run, processes, SAMPLED[processes])


@pytest.mark.parametrize("processes", [1, 2])
def test_a_tensor_of_another_shape_or_dtype_is_refused_by_name(processes: int) -> None:
    run_distributed(wrong_tensors, processes)


def wrong_tensors(rank: int, world_size: int) -> None:
    """Each weight of a layer with other sizes, those that join to the same shard among them, and quantized."""
    from megatron_dppo.mcore.shims import apply_shims

    platform = Platform.detect(force_cpu=True)
    apply_shims(platform)
    from megatron.core import parallel_state

    for family, tied in (("qwen2", True), ("llama", False), ("glm4_moe", False), ("deepseek_v3", False)):
        model = hf_reference(tied, family=family)
        bridge = build_trainer(
            Case(TP if world_size == 2 else {}, family=family, tied=tied), model, platform, "fp32"
        ).bridge
        weights, expected = dict(stream_model(model)), weight_shapes(model.config)
        names = [n for n in expected if not re.search(r"layers\.[02]|experts\.[1-9]", n)]
        for name in names:
            weight = weights[name]
            refused(bridge, weights | {name: weight.to(torch.int8)}, name)
            for dim in range(weight.ndim):
                refused(bridge, weights | {name: torch.cat([weight, weight.narrow(dim, 0, 1)], dim)}, name)
                refused(bridge, weights | {name: weight.narrow(dim, 0, weight.shape[dim] - 1)}, name)
        if family == "llama":  # the rows of q, k and v add up
            query, key = ("model.layers.1.self_attn." + n for n in ("q_proj.weight", "k_proj.weight"))
            refused(bridge, weights | {query: weights[query][:32], key: weights[query]}, query)
        if tied:
            refused(bridge, weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1}, "lm_head.weight")
        bridge.load(DictWeights(weights.items()))
        parallel_state.destroy_model_parallel()


def refused(bridge: Any, weights: dict[str, Tensor], name: str) -> None:
    with pytest.raises(CheckpointError, match=f"Expected {re.escape(name)} "):
        bridge.load(DictWeights(weights.items()))


@pytest.mark.long
@pytest.mark.parametrize("processes", sorted(EXPERTS))
def test_families_equal_transformers_on_all_layouts(processes: int) -> None:
    run_distributed(run, processes, whole_grid(processes), timeout=1800.0)


def exported(trainer: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The biases of the routers by name, and all other weights."""
    result = {name: tensor.clone() for name, tensor in trainer.export_weights()}
    biases = {name: result.pop(name) for name in list(result) if name.endswith("e_score_correction_bias")}
    return biases, result


def biases_of_routers(rank: int, world_size: int, folder: str) -> None:
    """In bf16: exact through an update; balanced when asked to, and then in the checkpoint; a reference has its own."""
    from megatron_dppo.mcore.shims import apply_shims

    platform = Platform.detect(force_cpu=True)
    apply_shims(platform)
    from megatron.core import parallel_state

    model, case = hf_reference(False, family="glm4_moe"), Case(EP, family="glm4_moe")
    trainer = build_trainer(case, model, platform, "bf16")
    with_more = DictWeights([*stream_model(model), ("model.layers.4.eh_proj.weight", torch.zeros(1))])
    with pytest.raises(CheckpointError, match=r"1 unexpected.*layers.4.eh_proj"):
        trainer.bridge.load(with_more)
    check_update(trainer, case, model, rate=0.0)
    parallel_state.destroy_model_parallel()
    model.config.num_nextn_predict_layers = 1  # a layer for further tokens, which is left out
    case = Case(EP, family="glm4_moe", transformer={"moe_router_bias_update_rate": 0.01})
    trainer = build_trainer(case, model, platform, "bf16")
    trainer.bridge.load(with_more)
    check_update(trainer, case, model, rate=0.01)
    saved, result = trainer.save(Path(folder), 1, {}, keep=1).path, exported(trainer)
    parallel_state.destroy_model_parallel()
    trainer = build_trainer(case, model, platform, "bf16")
    trainer.load(saved)
    for weights, second in zip(result, exported(trainer), strict=True):
        assert weights and all(torch.equal(second[name], weight) for name, weight in weights.items())


def check_update(trainer: Any, case: Case, model: Any, *, rate: float) -> None:
    """The biases after one update, and those of a reference policy."""
    from megatron_dppo.mcore.host_memory import ReferenceWeights

    given = {name: bias for name, bias in model.state_dict().items() if name.endswith("e_score_correction_bias")}
    biases, before = exported(trainer)
    assert biases.keys() == given.keys() and all(torch.equal(biases[name], given[name]) for name in given)
    reference = ReferenceWeights(trainer.models)
    batches = Updater(trainer, config_for(case).train, LOSS).pack_batches(
        samples()[trainer.dp_rank :: trainer.layout.dp]
    )
    trainer.apply(trainer.accumulate(batches, policy_objective(LOSS)))
    biases, others = exported(trainer)
    assert any(not torch.equal(others[name], weight) for name, weight in before.items())
    for name, bias in biases.items():
        moved = (bias - given[name]).abs()
        assert bias.dtype == torch.float32 and bool(moved.max() > 0) == bool(rate)
        assert bool(((moved < 1e-6) | ((moved - rate).abs() < 1e-6)).all())
    with reference.swapped_in():
        assert all(torch.equal(bias, given[name]) for name, bias in exported(trainer)[0].items())
    assert all(torch.equal(bias, biases[name]) for name, bias in exported(trainer)[0].items())


def test_biases_of_routers_stay_or_follow_the_load(tmp_path: Path) -> None:
    run_distributed(biases_of_routers, 2, str(tmp_path))
