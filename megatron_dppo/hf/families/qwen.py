"""Qwen2, Qwen2-MoE, Qwen3 and Qwen3-MoE."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from megatron_dppo.config.layout import ModelShape
from megatron_dppo.hf.families.family import (
    Family,
    Published,
    common_shape,
    expert_fields,
    grouped_fields,
    require_values,
)
from megatron_dppo.hf.families.rules import EXPERTS, H, M, Rule, gated
from megatron_dppo.types.model_folder import HfConfig

SHARED_EXPERT = (
    Rule(M + "mlp.shared_experts.gate_weight", (H + "mlp.shared_expert_gate.weight",)),
    *gated("mlp.shared_experts", "mlp.shared_expert"),
)


def _shape(hf_config: HfConfig, **family_fields: Any) -> ModelShape:
    # Keys of some published config.json files that transformers does not read.
    require_values(
        hf_config,
        attention_bias=False,
        qkv_bias=family_fields.get("has_qkv_bias", False),
        use_qk_norm=family_fields.get("has_qk_norm", False),
        use_mrope=False,
    )
    if not family_fields.get("has_shared_expert"):
        require_values(hf_config, shared_expert_intermediate_size=(0, None))
    return common_shape(hf_config, **family_fields)


def _moe_shape(hf_config: HfConfig, **family_fields: Any) -> ModelShape:
    layers = range(hf_config.num_hidden_layers)
    step = hf_config.decoder_sparse_step
    # As in transformers: a layer is dense if it is listed, or if no MoE step falls on it.
    dense = tuple(i for i in layers if i in hf_config.mlp_only_layers or (i + 1) % step)
    return _shape(hf_config, num_experts=hf_config.num_experts, dense_layers=dense, **family_fields)


def _qwen2_moe_shape(hf_config: HfConfig) -> ModelShape:
    return _moe_shape(hf_config, has_qkv_bias=hf_config.qkv_bias, has_shared_expert=True)


def _fields(hf_config: HfConfig, shape: ModelShape) -> dict[str, Any]:
    fields = grouped_fields(hf_config, shape) | expert_fields(hf_config, shape)
    if shape.num_experts is not None:
        # Megatron's softmax after the choice makes the weights add up to 1; the one before it leaves them smaller.
        fields["moe_router_pre_softmax"] = not hf_config.norm_topk_prob
    if shape.has_shared_expert:
        fields["moe_shared_expert_intermediate_size"] = hf_config.shared_expert_intermediate_size
        fields["moe_shared_expert_gate"] = True
    return fields


_EXPERTS_TINY: Mapping[str, object] = dict(
    head_dim=16,
    moe_intermediate_size=48,
    num_experts=8,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
)
_QWEN3_30B = dict(
    vocab_size=151936,
    hidden_size=2048,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    moe_intermediate_size=768,
    num_experts=128,
)
_QWEN3_235B = {
    **_QWEN3_30B,
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "moe_intermediate_size": 1536,
}
_QWEN3_8B = dict(
    vocab_size=151936,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_key_value_heads=8,
)
_QWEN2_7B = dict(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
)
_QWEN2_57B = dict(
    hidden_size=3584,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    moe_intermediate_size=2560,
    shared_expert_intermediate_size=20480,
    num_experts=64,
    num_experts_per_tok=8,
)
_family = partial(
    Family,
    fields=_fields,
    other_keys=("qkv_bias", "use_qk_norm", "use_mrope", "shared_expert_intermediate_size"),
)
FAMILIES = (
    _family(
        model_type="qwen3_moe",
        hf_class="Qwen3MoeForCausalLM",
        shape=partial(_moe_shape, has_qk_norm=True),
        models="Qwen3-30B-A3B, 235B-A22B",
        features="norms of q and k; dense layers between",
        tiny=_EXPERTS_TINY,
        published=(
            Published("Qwen3-30B-A3B", _QWEN3_30B, 30.53, (30.5, 3.3)),
            Published("Qwen3-235B-A22B", _QWEN3_235B, 235.1, (235, 22)),
        ),
        recipes=("qwen3_30b_a3b/dppo.toml", "paper/moe_base.toml", "paper/moe_thinking.toml", "chain_sum/dppo.toml"),
    ),
    _family(
        model_type="qwen3",
        hf_class="Qwen3ForCausalLM",
        shape=partial(_shape, has_qk_norm=True),
        models="Qwen3 dense",
        features="norms of q and k",
        tiny={"head_dim": 16},
        published=(Published("Qwen3-8B", _QWEN3_8B, 8.19),),
        recipes=("rlhf/dppo.toml", "distillation/opd.toml", "agents/calculator.toml", "paper/dense_base.toml"),
    ),
    _family(
        model_type="qwen2_moe",
        hf_class="Qwen2MoeForCausalLM",
        shape=_qwen2_moe_shape,
        experts=EXPERTS + SHARED_EXPERT,
        models="Qwen1.5-MoE, Qwen2-57B-A14B",
        features="a shared expert behind a gate, biases of q, k, v",
        tiny={**_EXPERTS_TINY, "shared_expert_intermediate_size": 40, "norm_topk_prob": False, "qkv_bias": True},
        published=(
            Published("Qwen1.5-MoE-A2.7B", {}, 14.32, (14.3, 2.7)),
            Published("Qwen2-57B-A14B", _QWEN2_57B, 57.41, (57, 14)),
        ),
        recipes=("smollm2/moe.toml",),
    ),
    _family(
        model_type="qwen2",
        hf_class="Qwen2ForCausalLM",
        shape=partial(_shape, has_qkv_bias=True),
        models="Qwen2, Qwen2.5",
        features="biases of q, k, v",
        tiny={},
        published=(Published("Qwen2.5-7B", _QWEN2_7B, 7.62),),
    ),
)
