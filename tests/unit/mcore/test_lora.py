"""The section [lora]: what is refused, and how adapters begin."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from megatron_dppo.config.model import LORA_TARGETS, LoraConfig
from megatron_dppo.mcore.lora import Lora
from megatron_dppo.mcore.lora_layer import LinearAdapter
from megatron_dppo.setup.changes import change_kind
from tests.distributed.parity import Case, config_for

BY_ADAPTER = {"method": "adapter"}
RANDOM = {"model": {"path": "m", "random_init": True}}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"lora": {"alpha": 8.0}}, r"lora\.alpha = 8\.0 has no effect"),
        ({"lora": {"target_modules": ["q_proj"]}}, "has no effect"),
        ({"lora": {"rank": 4, "target_modules": []}}, "at least 1 item"),
        ({"lora": {"rank": 4, "target_modules": ["gate"]}}, "'q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj'"),
        ({"lora": {"rank": 4, "target_modules": ["q_proj", "q_proj"]}}, "q_proj more than once"),
        ({"lora": {"rank": -1}}, "than or equal"),
        ({"lora": {"rank": 4, "dropout": 0.1}}, "Extra inputs"),
        ({"lora": {"rank": 4}, "model": {"transformer": {"moe_shared_expert_overlap": True}}}, "do not communicate"),
        ({"rollout": {"engine": "vllm", "weight_sync": BY_ADAPTER}}, r"lora\.rank = 0: there"),
        (
            {"lora": {"rank": 4}, "rollout": {"engine": "vllm", "weight_sync": BY_ADAPTER}, **RANDOM},
            r"model\.random_init = true: the servers",
        ),
        (
            {
                "lora": {"rank": 4},
                "rollout": {"engine": "sglang", "weight_sync": BY_ADAPTER, "servers": {"colocated": True}},
            },
            "lose the base",
        ),
    ],
)
def test_incompatible_inputs_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config_for(Case(), **sections)


def test_scale_and_defaults() -> None:
    assert LoraConfig(rank=32).scale == 2.0 and LoraConfig(rank=8, alpha=4.0).scale == 0.5
    assert tuple(LoraConfig(rank=8).target_modules) == LORA_TARGETS and LoraConfig().rank == 0


def test_a_run_resumes_with_its_adapters() -> None:
    assert (change_kind("lora.rank"), change_kind("lora.target_modules"), change_kind("lora.alpha")) == (
        "fixed",
        "fixed",
        "results",
    )


def test_a_is_initialized_as_in_peft() -> None:
    """kaiming_uniform(a = sqrt 5): uniform with the same bound; the name alone decides the numbers."""
    from megatron_dppo.mcore.shims import apply_shims
    from megatron_dppo.parallel.platform import Platform

    apply_shims(Platform.detect(force_cpu=True))
    from megatron_dppo.mcore.lora_layer import kaiming_uniform

    result, other = kaiming_uniform(64, 400, "0 q"), torch.empty(64, 400)
    torch.nn.init.kaiming_uniform_(other, a=math.sqrt(5))
    ratios = [float(statistic(result) / statistic(other)) for statistic in (torch.std, torch.max, torch.min)]
    for value in ratios:
        assert value == pytest.approx(1.0, abs=0.02)
    assert torch.equal(result, kaiming_uniform(64, 400, "0 q"))
    assert not torch.equal(result, kaiming_uniform(64, 400, "0 k"))


def test_weights_are_merged_in_fp32_and_rounded_once() -> None:
    """Half a step of bf16 and a little more rounds up; either part rounded before the sum would round to even."""
    step, little = 2.0**-7, 2.0**-17
    weight = torch.ones(1, 1, dtype=torch.bfloat16)
    factors = (torch.tensor([[1.0], [little]]), torch.tensor([[step / 2, 1.0]]))
    adapter: Any = SimpleNamespace(joined_factors=lambda: factors, _is_expert=False, _scale=1.0)
    delta = LinearAdapter.delta(adapter)
    assert delta.dtype == torch.float32 and float(delta) == step / 2 + little
    halves = tuple(factor.bfloat16() for factor in factors)
    adapter = SimpleNamespace(joined_factors=lambda: halves, _is_expert=False, _scale=1.0)
    assert float(LinearAdapter.delta(adapter)) == step / 2 + little, "bf16 factors are multiplied in fp32"
    adapters: Any = SimpleNamespace(_adapter_by_weight={weight: (SimpleNamespace(delta=lambda expert: delta), 0)})
    merged = Lora.merge(adapters, weight)
    assert merged.dtype == torch.bfloat16 and float(merged) == 1 + step
    other = torch.ones(2, dtype=torch.bfloat16)
    assert torch.equal(Lora.merge(adapters, other), other)
