"""Mixtral: Mistral's attention, and experts with names of their own."""

from dataclasses import replace
from typing import Any

from megatron_dppo.config.layout import ModelShape
from megatron_dppo.hf.families.family import (
    Family,
    Published,
    common_shape,
    expert_fields,
    grouped_fields,
    require_values,
    window_layers,
)
from megatron_dppo.hf.families.rules import EXPERTS, rename
from megatron_dppo.types.model_folder import HfConfig

MIXTRAL_NAMES = (
    (".mlp.", ".block_sparse_moe."),
    (".gate_proj.", ".w1."),
    (".down_proj.", ".w2."),
    (".up_proj.", ".w3."),
)
MIXTRAL_EXPERTS = tuple(replace(rule, hf=tuple(rename(name, MIXTRAL_NAMES) for name in rule.hf)) for rule in EXPERTS)


def _shape(hf_config: HfConfig) -> ModelShape:
    require_values(hf_config, router_jitter_noise=0.0, attention_bias=False, layer_types=None)
    return common_shape(hf_config, num_experts=hf_config.num_local_experts, window_layers=window_layers(hf_config))


def _fields(hf_config: HfConfig, shape: ModelShape) -> dict[str, Any]:
    # Megatron's softmax after the choice of experts makes the weights add up to 1.
    return grouped_fields(hf_config, shape) | expert_fields(hf_config, shape) | {"moe_router_pre_softmax": False}


FAMILIES = (
    Family(
        model_type="mixtral",
        hf_class="MixtralForCausalLM",
        models="Mixtral-8x7B, 8x22B",
        features="experts are `block_sparse_moe.experts.N.w1`, `w2`, `w3` on disk",
        tiny={"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
        variants={
            "mixtral_window": {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 6}
        },
        published=(
            Published("Mixtral-8x7B", {}, 46.70, (46.7, 12.9)),
            Published(
                "Mixtral-8x22B",
                {"hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56, "num_attention_heads": 48}
                | {"vocab_size": 32768},
                140.63,
                (141, 39),
            ),
        ),
        shape=_shape,
        fields=_fields,
        experts=MIXTRAL_EXPERTS,
        disk_names=MIXTRAL_NAMES,
    ),
)
