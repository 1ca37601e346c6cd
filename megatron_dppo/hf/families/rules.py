"""The rules between Hugging Face and Megatron weights that families are made of, both directions from one table.

A rule joins the Hugging Face tensors of one Megatron parameter into the *full* Megatron tensor and splits it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dppo.config.layout import ModelShape

Join = Callable[[Sequence[Tensor], ModelShape], Tensor]
Split = Callable[[Tensor, ModelShape], list[Tensor]]


def _only(parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
    return parts[0]


def _alone(full: Tensor, shape: ModelShape) -> list[Tensor]:
    return [full]


def _join_qkv(parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
    """Megatron keeps, for each query group, its query heads, its key head and its value head together."""
    groups, trailing = shape.num_query_groups, parts[0].shape[1:]
    return torch.cat([p.reshape(groups, -1, *trailing) for p in parts], 1).reshape(-1, *trailing)


def _split_qkv(full: Tensor, shape: ModelShape) -> list[Tensor]:
    groups, trailing = shape.num_query_groups, full.shape[1:]
    heads = shape.num_attention_heads // groups
    unit = full.shape[0] // (groups * (heads + 2))
    parts = full.reshape(groups, -1, *trailing).split([heads * unit, unit, unit], 1)
    return [p.reshape(-1, *trailing) for p in parts]


def _join_gated(parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
    return torch.cat(list(parts), 0)


def _split_gated(full: Tensor, shape: ModelShape) -> list[Tensor]:
    return list(full.chunk(2, 0))


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter and its Hugging Face tensors.

    ``{layer}`` and ``{expert}`` stand for global indices. ``shard_dim`` is the dimension that tensor parallelism
    cuts (None = replicated); ``gated`` parameters are cut in each half; ``padded`` ones have a padded vocabulary.
    """

    megatron: str
    hf: tuple[str, ...]
    shard_dim: int | None = None
    join: Join = _only
    split: Split = _alone
    gated: bool = False
    padded: bool = False

    @property
    def is_expert(self) -> bool:
        """Whether the parameter belongs to one expert."""
        return "{expert}" in self.megatron

    def names(self, layer: int, expert: int) -> tuple[str, tuple[str, ...]]:
        """The Megatron name and the Hugging Face names for a layer and an expert."""
        fill = {"layer": layer, "expert": expert}
        return self.megatron.format(**fill), tuple(name.format(**fill) for name in self.hf)


M, H = "decoder.layers.{layer}.", "model.layers.{layer}."
"""how the names of a layer begin in Megatron, and in Hugging Face"""


def gated(megatron: str, hf: str) -> tuple[Rule, Rule]:
    """A gated MLP: its joined gate and up projections, and its down projection.

    Args:
        megatron: the name in a layer, with ``{}`` for what follows ``linear_fc1`` and ``linear_fc2``.
        hf: the name in a layer before ``gate_proj``.
    """
    suffix = "{expert}" if "{expert}" in hf else ""
    gate_up = tuple(f"{H}{hf}.{x}_proj.weight" for x in ("gate", "up"))
    return (
        Rule(f"{M}{megatron}.linear_fc1.weight{suffix}", gate_up, 0, _join_gated, _split_gated, gated=True),
        Rule(f"{M}{megatron}.linear_fc2.weight{suffix}", (f"{H}{hf}.down_proj.weight",), shard_dim=1),
    )


_QKV = tuple(H + f"self_attn.{x}_proj" for x in "qkv")
GROUPED_ATTENTION = (
    Rule(M + "self_attention.linear_qkv.layer_norm_weight", (H + "input_layernorm.weight",)),
    Rule(M + "self_attention.linear_qkv.weight", tuple(f"{x}.weight" for x in _QKV), 0, _join_qkv, _split_qkv),
    Rule(M + "self_attention.linear_proj.weight", (H + "self_attn.o_proj.weight",), shard_dim=1),
)
QKV_BIAS = (Rule(M + "self_attention.linear_qkv.bias", tuple(f"{x}.bias" for x in _QKV), 0, _join_qkv, _split_qkv),)
QK_NORM = (
    Rule(M + "self_attention.q_layernorm.weight", (H + "self_attn.q_norm.weight",)),
    Rule(M + "self_attention.k_layernorm.weight", (H + "self_attn.k_norm.weight",)),
)
DENSE_MLP = (
    Rule(M + "mlp.linear_fc1.layer_norm_weight", (H + "post_attention_layernorm.weight",)),
    *gated("mlp", "mlp"),
)
EXPERTS = (
    Rule(M + "pre_mlp_layernorm.weight", (H + "post_attention_layernorm.weight",)),
    Rule(M + "mlp.router.weight", (H + "mlp.gate.weight",)),
    *gated("mlp.experts", "mlp.experts.{expert}"),
)
ROUTER_BIAS = (Rule(M + "mlp.router.expert_bias", (H + "mlp.gate.e_score_correction_bias",)),)
"""A buffer, in fp32 whatever the model's dtype."""
EMBEDDING = Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), shard_dim=0, padded=True)
FINAL_NORM = Rule("decoder.final_layernorm.weight", ("model.norm.weight",))
OUTPUT = Rule("output_layer.weight", ("lm_head.weight",), shard_dim=0, padded=True)
TIED_OUTPUT = Rule("output_layer.weight", EMBEDDING.hf, shard_dim=0, padded=True)


def grouped_attention(shape: ModelShape) -> tuple[Rule, ...]:
    """Attention with grouped queries, with what a family's model has of biases and norms."""
    return GROUPED_ATTENTION + QKV_BIAS * shape.has_qkv_bias + QK_NORM * shape.has_qk_norm
