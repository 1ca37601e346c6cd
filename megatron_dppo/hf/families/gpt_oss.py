"""Models gpt-oss: attention sinks, windows in every other layer, biases everywhere, a clamped SwiGLU, YaRN."""

from typing import Any

from megatron_dppo.config.layout import ModelShape
from megatron_dppo.hf.families.family import (
    SLIDING,
    Family,
    Published,
    Rope,
    common_shape,
    default_rope,
    expert_fields,
    grouped_fields,
    raise_unsupported,
    require_full_rotation,
    require_values,
    rope_parameters,
    window_layers,
    yarn_fields,
)
from megatron_dppo.hf.families.fused_experts import INTERLEAVED
from megatron_dppo.hf.families.rules import GROUPED_ATTENTION, QKV_BIAS, H, M, Rule, gated, gated_bias
from megatron_dppo.types.model_folder import HfConfig

_A, _S = M + "self_attention.", H + "self_attn."
_ATTENTION = (
    *GROUPED_ATTENTION,
    *QKV_BIAS,
    Rule(_A + "linear_proj.bias", (_S + "o_proj.bias",)),
    Rule(_A + "core_attention.softmax_offset", (_S + "sinks",), shard_dim=0),
)
_EXPERTS = (
    Rule(M + "pre_mlp_layernorm.weight", (H + "post_attention_layernorm.weight",)),
    Rule(M + "mlp.router.weight", (H + "mlp.router.weight",)),
    Rule(M + "mlp.router.bias", (H + "mlp.router.bias",)),
    *gated("mlp.experts", "mlp.experts.{expert}"),
    *gated_bias("mlp.experts", "mlp.experts.{expert}"),
)
_QUICK_GELU = 1.702
"""Factor in the sigmoid of Megatron's ``quick_gelu``."""


def _shape(hf_config: HfConfig) -> ModelShape:
    require_values(hf_config, attention_bias=True, swiglu_alpha=_QUICK_GELU)
    # Keys of the published config.json that transformers does not read.
    require_values(hf_config, experts_per_token=hf_config.num_experts_per_tok)
    limit = hf_config.swiglu_limit
    if not isinstance(limit, float) or not 0 < limit < float("inf"):
        raise_unsupported(hf_config, "swiglu_limit", limit, "a positive number")
    return common_shape(
        hf_config,
        kinds=("full_attention", SLIDING),
        num_experts=hf_config.num_local_experts,
        has_qkv_bias=True,
        has_attention_sinks=True,
        has_linear_bias=True,
        window_layers=window_layers(hf_config),
    )


def _fields(hf_config: HfConfig, shape: ModelShape) -> dict[str, Any]:
    return (
        grouped_fields(hf_config, shape)
        | expert_fields(hf_config, shape)
        | dict(
            add_bias_linear=True,
            softmax_type="learnable",
            quick_geglu=True,
            glu_linear_offset=1.0,
            activation_func_clamp_value=hf_config.swiglu_limit,
            # Megatron's fused kernel leaves out YaRN's factor in packed rows.
            apply_rope_fusion=False,
            # Megatron's softmax after the choice makes the weights add up to 1.
            moe_router_pre_softmax=False,
        )
    )


def _rope(hf_config: HfConfig) -> Rope:
    parameters = rope_parameters(hf_config, "default", "yarn")
    if parameters["rope_type"] == "default":
        return default_rope(hf_config)
    # Keys with which transformers or servers compute another scale of the embedding.
    for key, value in {"attention_factor": None, "mscale": None, "mscale_all_dim": None}.items():
        if parameters.get(key) is not value:
            raise_unsupported(hf_config, f"rope_parameters.{key}", parameters[key], f"{value!r}")
    require_full_rotation(hf_config, parameters)
    return Rope(
        parameters["rope_theta"],
        yarn=dict(
            **yarn_fields(hf_config, parameters),
            mscale=None,
            mscale_all_dim=None,
            correction_range_round_to_int=bool(parameters.get("truncate", True)),
        ),
    )


FAMILIES = (
    Family(
        model_type="gpt_oss",
        hf_class="GptOssForCausalLM",
        models="gpt-oss-20b, gpt-oss-120b",
        features="attention sinks, a window in every other layer, biases in all layers and experts, a clamped SwiGLU, "
        "YaRN; experts in MXFP4 are read",
        tiny={
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            # Small enough to clamp some of the tiny model's numbers.
            "swiglu_limit": 1.0,
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32},
                **{"beta_fast": 4.0, "beta_slow": 1.0, "truncate": False},
            },
        },
        published=(
            Published("gpt-oss-20b", {"num_hidden_layers": 24, "num_local_experts": 32}, 20.91, (20.91, 3.61)),
            Published("gpt-oss-120b", {}, 116.83, (116.83, 5.13)),
        ),
        recipes=("gpt_oss_20b/dppo.toml",),
        shape=_shape,
        fields=_fields,
        rope=_rope,
        # No one reads ``initial_context_length``: the rotary embedding has the same number.
        other_keys=("experts_per_token", "initial_context_length"),
        # vLLM has this number in its code.
        served_keys=lambda values: {"swiglu_limit": 7.0},
        attention=lambda shape: _ATTENTION,
        experts=_EXPERTS,
        fused_experts=INTERLEAVED,
    ),
)
