"""What the package has to know of a family of models, and what families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron_dppo.config.layout import ModelShape
from megatron_dppo.errors import CheckpointError
from megatron_dppo.hf.families.rules import EXPERTS, Rule


@dataclass(frozen=True)
class Rope:
    """The rotary embedding, as arguments of Megatron's GPTModel."""

    theta: float
    percent: float = 1.0
    """share of a head's dimensions that is rotated, the first ones"""
    llama3_factor: float | None = None
    """of Llama 3's scaling; None = not scaled"""

    def arguments(self) -> dict[str, Any]:
        """By GPTModel's names."""
        scaling = (
            {} if self.llama3_factor is None else {"rope_scaling": True, "rope_scaling_factor": self.llama3_factor}
        )
        return {"rotary_base": self.theta, "rotary_percent": self.percent, **scaling}


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models with one Hugging Face class: sizes, fields in Megatron's configuration, names of weights."""

    model_type: str
    hf_class: str
    shape: Callable[[Any], ModelShape]
    """from config.json; refuses what it has no mapping for"""
    fields: Callable[[Any, ModelShape], dict[str, Any]]
    """of Megatron's TransformerConfig, beyond those that every family has"""
    rope: Callable[[Any], Rope]
    attention: Callable[[ModelShape], tuple[Rule, ...]]
    dense: tuple[Rule, ...]
    """of a layer without experts"""
    experts: tuple[Rule, ...] = EXPERTS
    """of a layer with experts"""


def refuse(hf_config: Any, key: str, value: Any, supported: str) -> NoReturn:
    """Stop before a model that would be computed otherwise than config.json says.

    Raises:
        CheckpointError: always.
    """
    raise CheckpointError(
        f"config.json of model_type {hf_config.model_type!r} has {key} = {value!r}, which is not supported; "
        f"supported: {supported}"
    )


def require_values(hf_config: Any, **expected: Any) -> None:
    """Stop unless each of these keys, where config.json has it at all, has the value, or one of a tuple of values.

    Raises:
        CheckpointError: the first that has another.
    """
    for key, values in expected.items():
        allowed = values if isinstance(values, tuple) else (values,)
        if (found := getattr(hf_config, key, allowed[0])) not in allowed:
            refuse(hf_config, key, found, " or ".join(map(repr, allowed)))


def check_common_keys(hf_config: Any) -> None:
    """Stop before what no family has.

    Raises:
        CheckpointError: quantised weights, another activation, layers with a window, biases in MLPs.
    """
    if getattr(hf_config, "quantization_config", None) is not None:
        method = dict(hf_config.quantization_config).get("quant_method", "")
        refuse(hf_config, "quantization_config", method, "weights in bf16, fp16 or fp32 (convert the folder first)")
    require_values(hf_config, hidden_act="silu", mlp_bias=(False, None), use_sliding_window=(False, None))
    kinds = set(getattr(hf_config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        refuse(hf_config, "layer_types", sorted(kinds), "'full_attention' in every layer")


def rope_parameters(hf_config: Any, *kinds: str) -> Mapping[str, Any]:
    """The parameters of the rotary embedding, wherever the transformers version keeps them, with ``rope_theta``.

    Args:
        hf_config: of any family.
        kinds: the values of ``rope_type`` that the family has.

    Raises:
        CheckpointError: another kind.
    """
    found = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
    kind = found.get("rope_type", found.get("type", "default"))
    if kind not in kinds:
        refuse(hf_config, "rope_type", kind, " or ".join(map(repr, kinds)))
    return {**found, "rope_type": kind, "rope_theta": float(found.get("rope_theta") or hf_config.rope_theta)}


def default_rope(hf_config: Any) -> Rope:
    """Of all dimensions of a head, not scaled.

    Raises:
        CheckpointError: another kind, or of a part of a head.
    """
    found = rope_parameters(hf_config, "default")
    if found.get("partial_rotary_factor", 1.0) != 1.0:
        refuse(hf_config, "partial_rotary_factor", found["partial_rotary_factor"], "1.0")
    return Rope(found["rope_theta"])


def common_shape(hf_config: Any, **more: Any) -> ModelShape:
    """The sizes that every family's config.json has under one name, with ``more`` of its own.

    Raises:
        CheckpointError: what no family has.
    """
    check_common_keys(hf_config)
    return ModelShape(
        family=hf_config.model_type,
        num_layers=hf_config.num_hidden_layers,
        num_attention_heads=hf_config.num_attention_heads,
        hidden_size=hf_config.hidden_size,
        vocab_size=hf_config.vocab_size,
        **{"num_query_groups": hf_config.num_key_value_heads, "num_experts": None} | more,
    )


def head_dim(hf_config: Any) -> int:
    """Of grouped attention."""
    found: int = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
    return found


def grouped_fields(hf_config: Any, shape: ModelShape) -> dict[str, Any]:
    """Attention with grouped queries, in Megatron's configuration."""
    return dict(
        num_query_groups=hf_config.num_key_value_heads,
        kv_channels=head_dim(hf_config),
        add_qkv_bias=shape.has_qkv_bias,
        qk_layernorm=shape.has_qk_norm,
    )


def expert_fields(hf_config: Any, shape: ModelShape) -> dict[str, Any]:
    """Layers with experts, in Megatron's configuration; {} for a dense model."""
    if shape.num_experts is None:
        return {}
    mixed = {"moe_layer_freq": [int(i not in shape.dense_layers) for i in range(shape.num_layers)]}
    return (mixed if shape.dense_layers else {}) | dict(
        moe_ffn_hidden_size=hf_config.moe_intermediate_size,
        num_moe_experts=shape.num_experts,
        moe_router_topk=hf_config.num_experts_per_tok,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_grouped_gemm=True,
    )
