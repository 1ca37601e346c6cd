"""DeepSeek-V3, Moonlight, Kimi-K2 and GLM-4.7-Flash: latent attention (MLA), sigmoid routers, shared experts.

The norms of the latents use the model's ``rms_norm_eps``, as in Megatron, SGLang and vLLM, and in the local engine
(``build_hf_model``). transformers uses 1e-6 there.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from megatron_dppo.config.layout import ModelShape
from megatron_dppo.hf.families.family import (
    Family,
    Published,
    Rope,
    raise_unsupported,
    require_full_rotation,
    require_values,
    rope_number,
    rope_parameters,
    yarn_fields,
)
from megatron_dppo.hf.families.rules import H, M, Rule
from megatron_dppo.hf.families.sigmoid import SIGMOID_EXPERTS, SIGMOID_KEYS, SIGMOID_TINY, sigmoid_fields, sigmoid_shape
from megatron_dppo.types.model_folder import HfConfig

_A, _S = M + "self_attention.", H + "self_attn."
# With MLA the norm before attention is a module of its own. The norms of the latents are in the up projections that
# read them.
_LATENT = (
    Rule(M + "input_layernorm.weight", (H + "input_layernorm.weight",)),
    Rule(_A + "linear_kv_down_proj.weight", (_S + "kv_a_proj_with_mqa.weight",)),
    Rule(_A + "linear_kv_up_proj.layer_norm_weight", (_S + "kv_a_layernorm.weight",)),
    Rule(_A + "linear_kv_up_proj.weight", (_S + "kv_b_proj.weight",), shard_dim=0),
    Rule(_A + "linear_proj.weight", (_S + "o_proj.weight",), shard_dim=1),
)
_QUERY = (Rule(_A + "linear_q_proj.weight", (_S + "q_proj.weight",), shard_dim=0),)
_LATENT_QUERY = (
    Rule(_A + "linear_q_down_proj.weight", (_S + "q_a_proj.weight",)),
    Rule(_A + "linear_q_up_proj.layer_norm_weight", (_S + "q_a_layernorm.weight",)),
    Rule(_A + "linear_q_up_proj.weight", (_S + "q_b_proj.weight",), shard_dim=0),
)


def _shape(hf_config: HfConfig, **family_fields: Any) -> ModelShape:
    require_values(hf_config, attention_bias=False, rope_interleave=True)
    # transformers sizes the rotary embedding by this key, which no published config.json of DeepSeek-V3 has.
    require_values(hf_config, head_dim=hf_config.qk_rope_head_dim)
    heads = hf_config.num_attention_heads
    if hf_config.num_key_value_heads != heads:
        raise_unsupported(
            hf_config, "num_key_value_heads", hf_config.num_key_value_heads, f"num_attention_heads ({heads})"
        )
    return sigmoid_shape(
        hf_config,
        has_latent_attention=True,
        has_latent_queries=hf_config.q_lora_rank is not None,
        **family_fields,
    )


def _lite_shape(hf_config: HfConfig) -> ModelShape:
    dense = tuple(i for i, kind in enumerate(hf_config.mlp_layer_types) if kind == "dense")
    # Servers read this key, transformers reads mlp_layer_types.
    require_values(hf_config, first_k_dense_replace=len(dense))
    if dense != tuple(range(len(dense))) or len(hf_config.mlp_layer_types) != hf_config.num_hidden_layers:
        raise_unsupported(hf_config, "mlp_layer_types", hf_config.mlp_layer_types, "dense layers before all others")
    return _shape(hf_config, dense_layers=dense)


def _attention(shape: ModelShape) -> tuple[Rule, ...]:
    return _LATENT + (_LATENT_QUERY if shape.has_latent_queries else _QUERY)


def _fields(hf_config: HfConfig, shape: ModelShape) -> dict[str, Any]:
    return (
        sigmoid_fields(hf_config, shape)
        | _rope_fields(hf_config)
        | dict(
            multi_latent_attention=True,
            num_query_groups=hf_config.num_attention_heads,
            kv_channels=hf_config.v_head_dim,
            q_lora_rank=hf_config.q_lora_rank,
            kv_lora_rank=hf_config.kv_lora_rank,
            qk_head_dim=hf_config.qk_nope_head_dim,
            qk_pos_emb_head_dim=hf_config.qk_rope_head_dim,
            v_head_dim=hf_config.v_head_dim,
            qk_layernorm=True,
            add_qkv_bias=False,
            # Megatron's fused kernel for MLA is experimental.
            apply_rope_fusion=False,
        )
    )


def _rope_fields(hf_config: HfConfig) -> dict[str, Any]:
    parameters = rope_parameters(hf_config, "default", "yarn")
    require_full_rotation(hf_config, parameters)
    if parameters["rope_type"] == "default":
        return dict(rope_type="rope", rotary_base=parameters["rope_theta"])
    for key, value in {"attention_factor": None, "truncate": True}.items():
        if parameters.get(key, value) != value:
            raise_unsupported(hf_config, f"rope_parameters.{key}", parameters[key], f"{value!r}")
    mscale = rope_number(hf_config, parameters, "mscale", 0.0)
    mscale_all_dim = rope_number(hf_config, parameters, "mscale_all_dim", 0.0)
    # transformers uses ``mscale`` only together with ``mscale_all_dim``; Megatron, SGLang and vLLM use each by itself.
    if (mscale_all_dim and not mscale) or (not mscale_all_dim and mscale not in (0.0, 1.0)):
        raise_unsupported(
            hf_config, "rope_parameters.mscale", parameters.get("mscale"), "mscale together with mscale_all_dim"
        )
    return dict(
        rope_type="yarn",
        rotary_base=parameters["rope_theta"],
        **yarn_fields(hf_config, parameters),
        mscale=mscale or 1.0,
        mscale_all_dim=mscale_all_dim,
    )


def _rope(hf_config: HfConfig) -> Rope:
    """Return arguments that GPTModel does not read: each MLA layer has its own rotary embedding."""
    return Rope(_rope_fields(hf_config)["rotary_base"])


LATENT_TINY: Mapping[str, object] = dict(
    **SIGMOID_TINY,
    num_key_value_heads=4,
    kv_lora_rank=24,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
)
_MOONLIGHT = dict(
    vocab_size=163840,
    hidden_size=2048,
    intermediate_size=11264,
    moe_intermediate_size=1408,
    num_hidden_layers=27,
    num_attention_heads=16,
    num_key_value_heads=16,
    n_routed_experts=64,
    n_shared_experts=2,
    num_experts_per_tok=6,
    q_lora_rank=None,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)
_KIMI_K2 = dict(
    vocab_size=163840,
    num_attention_heads=64,
    num_key_value_heads=64,
    n_routed_experts=384,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)


def _served_keys(values: Mapping[str, Any]) -> Mapping[str, object]:
    routers = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    kinds = values.get("mlp_layer_types")
    return routers if kinds is None else {**routers, "first_k_dense_replace": kinds.count("dense")}


_family = partial(
    Family,
    fields=_fields,
    rope=_rope,
    attention=_attention,
    experts=SIGMOID_EXPERTS,
    other_keys=(*SIGMOID_KEYS, "first_k_dense_replace", "qk_head_dim"),
    served_keys=_served_keys,
)
FAMILIES = (
    _family(
        model_type="deepseek_v3",
        aliases=("kimi_k2",),
        hf_class="DeepseekV3ForCausalLM",
        models="DeepSeek-V3, R1, Moonlight, Kimi-K2 (`kimi_k2`)",
        features="GLM's sigmoid routers and shared experts, with experts in groups; latent attention (MLA), with or "
        "without compressed queries; YaRN",
        tiny={
            **LATENT_TINY,
            "q_lora_rank": 32,
            "n_group": 2,
            "topk_group": 1,
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32},
                **{"mscale": 0.7, "mscale_all_dim": 0.9, "beta_fast": 4, "beta_slow": 1},
            },
        },
        variants={
            # So large that the norms of latents show it.
            "moonlight": {**LATENT_TINY, "q_lora_rank": None, "rms_norm_eps": 1e-2},
            "kimi_k2": {
                **LATENT_TINY,
                "q_lora_rank": 32,
                "n_shared_experts": 1,
                "rope_parameters": {
                    **{"rope_type": "yarn", "rope_theta": 5e4, "factor": 32.0, "original_max_position_embeddings": 8},
                    **{"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 1.0, "beta_slow": 1.0},
                },
            },
        },
        published=(
            Published("DeepSeek-V3", {}, 671.0, (671, 37)),
            Published("Moonlight-16B-A3B", _MOONLIGHT, 15.96, (16, 3)),
            Published("Kimi-K2", _KIMI_K2, 1026.0, (1000, 32)),
        ),
        shape=_shape,
    ),
    _family(
        model_type="glm4_moe_lite",
        hf_class="Glm4MoeLiteForCausalLM",
        models="GLM-4.7-Flash",
        features="DeepSeek-V3's attention, GLM's experts",
        tiny={
            **{key: value for key, value in LATENT_TINY.items() if key != "first_k_dense_replace"},
            "q_lora_rank": 32,
            "routed_scaling_factor": 1.8,
            "rms_norm_eps": 1e-2,
        },
        published=(Published("GLM-4.7-Flash", {}, 29.94, (30, 3)),),
        shape=_lite_shape,
    ),
)
