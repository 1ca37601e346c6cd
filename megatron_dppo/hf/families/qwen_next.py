"""Qwen3-Next and the text model of Qwen3.5-MoE: gated delta nets, with gated full attention in every fourth layer."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.config.layout import LinearAttentionShape, ModelShape
from megatron_dppo.hf.families.family import (
    Family,
    Published,
    common_shape,
    expert_fields,
    grouped_fields,
    partial_rope,
    raise_unsupported,
    require_values,
)
from megatron_dppo.hf.families.qwen import SHARED_EXPERT
from megatron_dppo.hf.families.rules import EXPERTS, QK_NORM, H, Join, M, Rule, Split, concatenate
from megatron_dppo.types.model_folder import HfConfig

_A, _S = M + "self_attention.", H + "self_attn."
_L = H + "linear_attn."


def _join_gated_qkv(parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
    """Join q, k and v. Hugging Face stores the gate of each query head behind the head.

    Megatron stores for each query group all query heads, then all their gates, the key head and the value head.
    """
    groups = shape.num_query_groups
    heads = shape.num_attention_heads // groups
    query, key, value = parts
    query = query.unflatten(0, (groups, heads, 2, -1)).transpose(1, 2).flatten(1, 3)
    key, value = (part.unflatten(0, (groups, -1)) for part in (key, value))
    return torch.cat([query, key, value], 1).flatten(0, 1)


def _split_gated_qkv(full: Tensor, shape: ModelShape) -> list[Tensor]:
    groups = shape.num_query_groups
    heads = shape.num_attention_heads // groups
    # Rows of one head.
    unit = full.shape[0] // (groups * (2 * heads + 2))
    query, key, value = full.unflatten(0, (groups, -1)).split([2 * heads * unit, unit, unit], 1)
    query = query.unflatten(1, (2, heads, unit)).transpose(1, 2).flatten(0, 3)
    return [query, key.flatten(0, 1), value.flatten(0, 1)]


def _linear(shape: ModelShape) -> LinearAttentionShape:
    assert shape.linear is not None
    return shape.linear


def _by_kind(tensor: Tensor, sizes: Sequence[int], heads: int) -> list[Tensor]:
    """Split rows that are stored together for each key head into the kinds, ``sizes`` rows each."""
    parts = tensor.unflatten(0, (heads, -1)).split([size // heads for size in sizes], 1)
    return [part.flatten(0, 1) for part in parts]


def _by_key_head(kinds: Sequence[Tensor], heads: int) -> Tensor:
    return torch.cat([kind.unflatten(0, (heads, -1)) for kind in kinds], 1).flatten(0, 1)


def _join_by_key_head(parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
    """Join the input projections of Qwen3-Next.

    It stores queries, keys, values and gates of a key head together, and in another weight its beta and alpha.
    """
    linear = _linear(shape)
    qkvz, ba = parts
    return torch.cat(
        _by_kind(qkvz, linear.sections[:4], linear.num_key_heads)
        + _by_kind(ba, linear.sections[4:], linear.num_key_heads)
    )


def _split_by_key_head(full: Tensor, shape: ModelShape) -> list[Tensor]:
    linear = _linear(shape)
    kinds = full.split(linear.sections)
    return [_by_key_head(kinds[:4], linear.num_key_heads), _by_key_head(kinds[4:], linear.num_key_heads)]


def _split_kinds(full: Tensor, shape: ModelShape) -> list[Tensor]:
    """Split the input projection of Qwen3.5, which stores queries, keys and values in one weight."""
    sections = _linear(shape).sections
    return list(full.split([sum(sections[:3]), *sections[3:]]))


def _sections(shape: ModelShape) -> tuple[int, ...]:
    return _linear(shape).sections


def _conv_sections(shape: ModelShape) -> tuple[int, ...]:
    return _linear(shape).sections[:3]


_ATTENTION = (
    Rule(_A + "linear_qkv.layer_norm_weight", (H + "input_layernorm.weight",)),
    Rule(_A + "linear_qkv.weight", tuple(f"{_S}{x}_proj.weight" for x in "qkv"), 0, _join_gated_qkv, _split_gated_qkv),
    Rule(_A + "linear_proj.weight", (_S + "o_proj.weight",), shard_dim=1),
    *QK_NORM,
)


def _linear_rules(
    projections: tuple[str, ...],
    join: Join,
    split: Split,
    hf_sections: Callable[[ModelShape], tuple[tuple[int, ...], ...]] | None = None,
) -> tuple[Rule, ...]:
    """Return the rules of linear attention, whose input projection is stored as these weights."""
    names = tuple(f"{_L}in_proj_{name}.weight" for name in projections)
    return (
        Rule(_A + "in_proj.layer_norm_weight", (H + "input_layernorm.weight",)),
        Rule(_A + "in_proj.weight", names, 0, join, split, sections=_sections, hf_sections=hf_sections),
        Rule(_A + "conv1d.weight", (_L + "conv1d.weight",), shard_dim=0, sections=_conv_sections),
        Rule(_A + "A_log", (_L + "A_log",), shard_dim=0),
        Rule(_A + "dt_bias", (_L + "dt_bias",), shard_dim=0),
        Rule(_A + "out_norm.weight", (_L + "norm.weight",)),
        Rule(_A + "out_proj.weight", (_L + "out_proj.weight",), shard_dim=1),
    )


_BY_KEY_HEAD = _linear_rules(("qkvz", "ba"), _join_by_key_head, _split_by_key_head)
_BY_KIND = _linear_rules(
    ("qkv", "z", "b", "a"), concatenate, _split_kinds, lambda shape: (_conv_sections(shape), (1,), (1,), (1,))
)


def _linear_shape(hf_config: HfConfig) -> LinearAttentionShape:
    layers = range(hf_config.num_hidden_layers)
    if len(hf_config.layer_types) != len(layers):
        raise_unsupported(
            hf_config, "layer_types", hf_config.layer_types, f"one kind for each of the {len(layers)} layers"
        )
    key_heads, value_heads = hf_config.linear_num_key_heads, hf_config.linear_num_value_heads
    if value_heads % key_heads:
        raise_unsupported(hf_config, "linear_num_value_heads", value_heads, f"a multiple of the {key_heads} key heads")
    linear_layers = tuple(i for i in layers if hf_config.layer_types[i] == "linear_attention")
    if len(linear_layers) == len(layers):
        raise_unsupported(hf_config, "layer_types", hf_config.layer_types, "at least one layer of 'full_attention'")
    return LinearAttentionShape(
        layers=linear_layers,
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_head_dim=hf_config.linear_key_head_dim,
        value_head_dim=hf_config.linear_value_head_dim,
    )


def _check_layers(hf_config: HfConfig) -> None:
    """Check ``layer_types`` against the interval of layers with full attention, from which SGLang derives them."""
    interval = getattr(hf_config, "full_attention_interval", None)
    if interval is None:
        return
    kinds = hf_config.layer_types
    is_same = isinstance(interval, int) and interval > 0
    if not is_same or any((kind == "full_attention") != ((i + 1) % interval == 0) for i, kind in enumerate(kinds)):
        raise_unsupported(hf_config, "full_attention_interval", interval, f"that of layer_types, {kinds}")


def _shape(hf_config: HfConfig) -> ModelShape:
    require_values(hf_config, attention_bias=False, attn_output_gate=True)
    # Transformers ignores these keys, and servers do not.
    require_values(
        hf_config,
        output_gate_type=("silu", "swish"),
        qkv_bias=False,
        layer_scale=False,
        dual_chunk_attention_config=None,
    )
    _check_layers(hf_config)
    layers = range(hf_config.num_hidden_layers)
    # Qwen3.5 has experts in every layer, and no such keys.
    step, listed = getattr(hf_config, "decoder_sparse_step", 1), getattr(hf_config, "mlp_only_layers", None) or ()
    return common_shape(
        hf_config,
        kinds=("full_attention", "linear_attention"),
        num_experts=hf_config.num_experts,
        dense_layers=tuple(i for i in layers if i in listed or (i + 1) % step),
        has_qk_norm=True,
        has_shared_expert=True,
        linear=_linear_shape(hf_config),
    )


def _shape_3_5(hf_config: HfConfig) -> ModelShape:
    # transformers ignores these keys, and servers may not.
    require_values(hf_config, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=([], None))
    return _shape(hf_config)


def _fields(hf_config: HfConfig, shape: ModelShape) -> dict[str, Any]:
    sizes = ("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim")
    heads = ("linear_num_key_heads", "linear_num_value_heads")
    return (
        grouped_fields(hf_config, shape)
        | expert_fields(hf_config, shape)
        | {name: getattr(hf_config, name) for name in sizes + heads}
        | dict(
            # 1 marks a layer with linear attention.
            linear_attention_freq=[int(i in shape.linear_layers) for i in range(shape.num_layers)],
            attention_output_gate=True,
            layernorm_zero_centered_gamma=True,
            # As in ``qwen``; Qwen3.5 always normalizes and has no such key.
            moe_router_pre_softmax=not getattr(hf_config, "norm_topk_prob", True),
            moe_shared_expert_intermediate_size=hf_config.shared_expert_intermediate_size,
            moe_shared_expert_gate=True,
        )
    )


_TINY: dict[str, object] = dict(
    # At 1e-6 the norm of a head's output divides by nearly nothing in such a small model, and amplifies fp32 rounding.
    rms_norm_eps=1e-2,
    head_dim=16,
    moe_intermediate_size=48,
    shared_expert_intermediate_size=40,
    num_experts=8,
    num_experts_per_tok=3,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
)
_QWEN3_5_397B = dict(
    hidden_size=4096,
    num_hidden_layers=60,
    num_attention_heads=32,
    linear_num_value_heads=64,
    num_experts=512,
    num_experts_per_tok=10,
    moe_intermediate_size=1024,
    shared_expert_intermediate_size=1024,
)
_CONTEXT = {"max_position_embeddings": 262144}
_family = partial(
    Family,
    fields=_fields,
    # Sections of positions (mrope) differ for images only; text has the same position in each.
    rope=partial_rope,
    attention=lambda shape: _ATTENTION,
    experts=EXPERTS + SHARED_EXPERT,
    other_keys=(
        *("attn_output_gate", "output_gate_type", "qkv_bias", "layer_scale", "dual_chunk_attention_config"),
        *("full_attention_interval", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"),
        # Layers for further tokens, the precision of a server's states, and a size of layers that Qwen3.5 lacks.
        *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype", "intermediate_size"),
    ),
)
FAMILIES = (
    _family(
        model_type="qwen3_next",
        hf_class="Qwen3NextForCausalLM",
        shape=_shape,
        models="Qwen3-Next-80B-A3B",
        features="gated delta nets (linear attention), every fourth layer gated full attention; a shared expert behind "
        "a gate, a quarter of a head rotated",
        tiny={**_TINY, "decoder_sparse_step": 1, "mlp_only_layers": [1]},
        # Without the layer for further tokens.
        published=(Published("Qwen3-Next-80B-A3B", _CONTEXT, 79.7, (80, 3)),),
        linear=lambda shape: _BY_KEY_HEAD,
    ),
    _family(
        model_type="qwen3_5_moe_text",
        hf_class="Qwen3_5MoeForCausalLM",
        shape=_shape_3_5,
        models="Qwen3.5-35B-A3B, 122B-A10B, 397B-A17B, Qwen3.6-35B-A3B (text)",
        features="as Qwen3-Next, experts in every layer",
        tiny=_TINY,
        # Without the layer for further tokens and the vision model.
        recipes=("qwen3_5_35b_a3b/dppo.toml", "qwen3_5_397b_a17b/dppo.toml"),
        published=(
            Published("Qwen3.5-35B-A3B", _CONTEXT, 34.7, (35, 3)),
            Published("Qwen3.5-397B-A17B", _QWEN3_5_397B | _CONTEXT, 396.3, (397, 17)),
        ),
        linear=lambda shape: _BY_KIND,
    ),
)
