"""MiniMax-M2: sigmoid routers with a bias, OLMoE's norms over all heads, Mixtral's names, half of a head rotated."""

from collections.abc import Mapping
from typing import Any

from megatron_dppo.config.layout import ModelShape
from megatron_dppo.hf.families.family import (
    Family,
    Published,
    common_shape,
    expert_fields,
    grouped_fields,
    head_dim,
    partial_rope,
    require_values,
)
from megatron_dppo.hf.families.mixtral import MIXTRAL_EXPERTS, MIXTRAL_NAMES
from megatron_dppo.hf.families.rules import H, M, Rule
from megatron_dppo.hf.families.sigmoid import SIGMOID_ROUTERS, require_two_experts
from megatron_dppo.types.model_folder import HfConfig

_BIAS = Rule(M + "mlp.router.expert_bias", (H + "block_sparse_moe.e_score_correction_bias",))


def _shape(hf_config: HfConfig) -> ModelShape:
    require_values(hf_config, sliding_window=None, router_jitter_noise=0.0, attention_bias=False)
    # Keys of the published config.json that transformers does not read.
    require_values(
        hf_config,
        use_qk_norm=True,
        qk_norm_type="per_layer",
        scoring_func="sigmoid",
        use_routing_bias=True,
        shared_intermediate_size=0,
        attn_type_list=[1] * hf_config.num_hidden_layers,
        # Servers read this key. transformers reads ``partial_rotary_factor`` first.
        rotary_dim=int(head_dim(hf_config) * partial_rope(hf_config).percent),
    )
    require_two_experts(hf_config)
    return common_shape(
        hf_config,
        num_experts=hf_config.num_local_experts,
        has_qk_norm=True,
        has_qk_norm_over_heads=True,
        has_router_bias=True,
    )


def _fields(hf_config: HfConfig, shape: ModelShape) -> dict[str, Any]:
    return grouped_fields(hf_config, shape) | expert_fields(hf_config, shape) | dict(SIGMOID_ROUTERS)


def _served_keys(values: Mapping[str, Any]) -> Mapping[str, object]:
    heads = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    rotated = (values.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0)
    norms = {"use_qk_norm": True, "qk_norm_type": "per_layer"}
    return {"rotary_dim": int(heads * rotated), "scoring_func": "sigmoid", "use_routing_bias": True, **norms}


FAMILIES = (
    Family(
        model_type="minimax_m2",
        hf_class="MiniMaxM2ForCausalLM",
        models="MiniMax-M2",
        features="sigmoid routers with a bias, norms over all heads, half of a head rotated, names of Mixtral",
        tiny={
            "head_dim": 24,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "eos_token_id": 2,
            "bos_token_id": 1,
        },
        published=(Published("MiniMax-M2", {}, 228.7, (230, 10)),),
        shape=_shape,
        fields=_fields,
        rope=partial_rope,
        other_keys=(
            *("use_qk_norm", "qk_norm_type", "scoring_func", "use_routing_bias", "shared_intermediate_size"),
            *("attn_type_list", "rotary_dim", "sliding_window"),
            # Layers for further tokens.
            *("use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
        ),
        served_keys=_served_keys,
        experts=(*MIXTRAL_EXPERTS, _BIAS),
        disk_names=MIXTRAL_NAMES,
    ),
)
