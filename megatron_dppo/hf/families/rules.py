"""Rules that map Hugging Face weights to Megatron parameters and back; families are composed of them.

A rule joins the Hugging Face tensors of one Megatron parameter into the *full* Megatron tensor, and splits it again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dppo.config.layout import ModelShape

Join = Callable[[Sequence[Tensor], ModelShape], Tensor]
Split = Callable[[Tensor, ModelShape], list[Tensor]]
Sections = Callable[[ModelShape], tuple[int, ...]]


def concatenate(parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
    """Join tensors along their first dimension."""
    return torch.cat(list(parts))


def _join_qkv(parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
    """Join q, k and v. Megatron stores each query group's query heads, key head and value head together."""
    groups = shape.num_query_groups
    trailing = parts[0].shape[1:]
    return torch.cat([p.reshape(groups, -1, *trailing) for p in parts], 1).reshape(-1, *trailing)


def _split_qkv(full: Tensor, shape: ModelShape) -> list[Tensor]:
    groups = shape.num_query_groups
    trailing = full.shape[1:]
    heads = shape.num_attention_heads // groups
    # Rows of one head.
    unit = full.shape[0] // (groups * (heads + 2))
    parts = full.reshape(groups, -1, *trailing).split([heads * unit, unit, unit], 1)
    return [p.reshape(-1, *trailing) for p in parts]


def _split_gated(full: Tensor, shape: ModelShape) -> list[Tensor]:
    return list(full.chunk(2, 0))


def cut_sections(tensor: Tensor, sizes: Sequence[int], dim: int) -> list[Tensor]:
    """Return the sections of a tensor along a dimension, by their relative sizes."""
    rows = tensor.shape[dim]
    return list(tensor.split([size * rows // sum(sizes) for size in sizes], dim))


def join_sections(shards: Sequence[Sequence[Tensor]], dim: int) -> Tensor:
    """Return the full tensor of all tensor-parallel shards in rank order, each given as its sections."""
    return torch.cat([torch.cat(parts, dim) for parts in zip(*shards, strict=True)], dim)


@dataclass(frozen=True)
class Rule:
    """Mapping of a Megatron parameter to its Hugging Face tensors; names have ``{layer}`` and ``{expert}``."""

    megatron: str
    hf: tuple[str, ...]
    """Hugging Face weight names, in the order in which they are joined."""
    shard_dim: int | None = None
    """Dimension that tensor parallelism splits. None means replicated."""
    join: Join = lambda parts, shape: parts[0]
    split: Split = lambda full, shape: [full]
    sections: Sections | None = None
    """Returns the relative sizes of sections along ``shard_dim``, each of which tensor parallelism splits separately,
    as gate and up. None means one section."""
    hf_sections: Callable[[ModelShape], tuple[tuple[int, ...], ...]] | None = None
    """Returns the relative sizes of the sections of each Hugging Face tensor. None means one section in each."""
    padded: bool = False
    """True if the first dimension is the padded vocabulary."""

    @property
    def is_expert(self) -> bool:
        """True if the parameter belongs to one expert."""
        return "{expert}" in self.megatron

    def cut(self, tensor: Tensor, shape: ModelShape) -> list[Tensor]:
        """Return the sections of a full tensor or of a shard. The rule must have a ``shard_dim``."""
        assert self.shard_dim is not None
        return cut_sections(tensor, (1,) if self.sections is None else self.sections(shape), self.shard_dim)

    def names(self, layer: int, expert: int) -> tuple[str, tuple[str, ...]]:
        """Return the Megatron name and the Hugging Face names for a layer and an expert."""
        fill = {"layer": layer, "expert": expert}
        return self.megatron.format(**fill), tuple(name.format(**fill) for name in self.hf)


M = "decoder.layers.{layer}."
H = "model.layers.{layer}."


def gated(megatron: str, hf: str) -> tuple[Rule, Rule]:
    """Return the rules of a gated MLP: gate and up joined, and down; for each expert with ``{expert}`` in ``hf``."""
    suffix = "{expert}" if "{expert}" in hf else ""
    gate_up = tuple(f"{H}{hf}.{x}_proj.weight" for x in ("gate", "up"))
    return (
        Rule(
            f"{M}{megatron}.linear_fc1.weight{suffix}",
            gate_up,
            0,
            concatenate,
            _split_gated,
            sections=lambda shape: (1, 1),
        ),
        Rule(f"{M}{megatron}.linear_fc2.weight{suffix}", (f"{H}{hf}.down_proj.weight",), shard_dim=1),
    )


def gated_bias(megatron: str, hf: str) -> tuple[Rule, Rule]:
    """Return the rules of the biases of a gated MLP of experts, which no tensor parallelism splits."""
    gate_up = tuple(f"{H}{hf}.{x}_proj.bias" for x in ("gate", "up"))
    return (
        Rule(f"{M}{megatron}.linear_fc1.bias{{expert}}", gate_up, None, concatenate, _split_gated),
        Rule(f"{M}{megatron}.linear_fc2.bias{{expert}}", (f"{H}{hf}.down_proj.bias",)),
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
# Megatron keeps the norm before attention and before a dense MLP in the linear layer that reads it. Before experts it
# is a module of its own, since the router reads it too.
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
"""Rule of the router bias, a buffer in fp32 for every model dtype."""
EMBEDDING = Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), shard_dim=0, padded=True)
FINAL_NORM = Rule("decoder.final_layernorm.weight", ("model.norm.weight",))
OUTPUT = Rule("output_layer.weight", ("lm_head.weight",), shard_dim=0, padded=True)
TIED_OUTPUT = Rule("output_layer.weight", EMBEDDING.hf, shard_dim=0, padded=True)


def grouped_attention(shape: ModelShape) -> tuple[Rule, ...]:
    """Return the rules of grouped-query attention, with the model's biases and norms."""
    return GROUPED_ATTENTION + QKV_BIAS * shape.has_qkv_bias + QK_NORM * shape.has_qk_norm


def rename(name: str, parts: Sequence[tuple[str, str]]) -> str:
    """Return a name with parts replaced: ``(part, its replacement)`` in this order."""
    for part, replacement in parts:
        name = name.replace(part, replacement)
    return name
