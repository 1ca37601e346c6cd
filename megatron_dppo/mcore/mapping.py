"""The table between Hugging Face and Megatron weights (Qwen3, Qwen3-MoE, Qwen2-MoE), both directions from one table.

A rule joins the Hugging Face tensors of one Megatron parameter into the *full* Megatron tensor and splits it again;
``shard`` and ``unshard`` cut a full tensor for tensor parallelism. Pure tensor algebra: no Megatron, no collectives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
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


_M, _H = "decoder.layers.{layer}.", "model.layers.{layer}."

ATTENTION_RULES = (
    Rule(_M + "self_attention.linear_qkv.layer_norm_weight", (_H + "input_layernorm.weight",)),
    Rule(
        _M + "self_attention.linear_qkv.weight",
        tuple(_H + f"self_attn.{x}_proj.weight" for x in "qkv"),
        shard_dim=0,
        join=_join_qkv,
        split=_split_qkv,
    ),
    Rule(_M + "self_attention.linear_proj.weight", (_H + "self_attn.o_proj.weight",), shard_dim=1),
)
QKV_BIAS_RULES = (
    Rule(
        _M + "self_attention.linear_qkv.bias",
        tuple(_H + f"self_attn.{x}_proj.bias" for x in "qkv"),
        shard_dim=0,
        join=_join_qkv,
        split=_split_qkv,
    ),
)
QK_NORM_RULES = (
    Rule(_M + "self_attention.q_layernorm.weight", (_H + "self_attn.q_norm.weight",)),
    Rule(_M + "self_attention.k_layernorm.weight", (_H + "self_attn.k_norm.weight",)),
)
DENSE_RULES = (
    Rule(_M + "mlp.linear_fc1.layer_norm_weight", (_H + "post_attention_layernorm.weight",)),
    Rule(
        _M + "mlp.linear_fc1.weight",
        tuple(_H + f"mlp.{x}_proj.weight" for x in ("gate", "up")),
        shard_dim=0,
        join=_join_gated,
        split=_split_gated,
        gated=True,
    ),
    Rule(_M + "mlp.linear_fc2.weight", (_H + "mlp.down_proj.weight",), shard_dim=1),
)
MOE_RULES = (
    Rule(_M + "pre_mlp_layernorm.weight", (_H + "post_attention_layernorm.weight",)),
    Rule(_M + "mlp.router.weight", (_H + "mlp.gate.weight",)),
    Rule(
        _M + "mlp.experts.linear_fc1.weight{expert}",
        tuple(_H + "mlp.experts.{expert}." + f"{x}_proj.weight" for x in ("gate", "up")),
        shard_dim=0,
        join=_join_gated,
        split=_split_gated,
        gated=True,
    ),
    Rule(_M + "mlp.experts.linear_fc2.weight{expert}", (_H + "mlp.experts.{expert}.down_proj.weight",), shard_dim=1),
)
SHARED_EXPERT_RULES = (
    Rule(_M + "mlp.shared_experts.gate_weight", (_H + "mlp.shared_expert_gate.weight",)),
    Rule(
        _M + "mlp.shared_experts.linear_fc1.weight",
        tuple(_H + f"mlp.shared_expert.{x}_proj.weight" for x in ("gate", "up")),
        shard_dim=0,
        join=_join_gated,
        split=_split_gated,
        gated=True,
    ),
    Rule(_M + "mlp.shared_experts.linear_fc2.weight", (_H + "mlp.shared_expert.down_proj.weight",), shard_dim=1),
)
EMBEDDING = Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), shard_dim=0, padded=True)
FINAL_NORM = Rule("decoder.final_layernorm.weight", ("model.norm.weight",))
OUTPUT = Rule("output_layer.weight", ("lm_head.weight",), shard_dim=0, padded=True)
TIED_OUTPUT = Rule("output_layer.weight", EMBEDDING.hf, shard_dim=0, padded=True)


def parameters(shape: ModelShape, tied: bool) -> Iterator[tuple[Rule, int, int]]:
    """Every ``(rule, layer, expert)`` of a model, in the order of the network; tied output weights are left out."""
    yield EMBEDDING, 0, 0
    rules = ATTENTION_RULES + QKV_BIAS_RULES * shape.has_qkv_bias + QK_NORM_RULES * shape.has_qk_norm
    experts = MOE_RULES + SHARED_EXPERT_RULES * shape.has_shared_expert
    for layer in range(shape.num_layers):
        for rule in rules + (experts if shape.num_experts and layer not in shape.dense_layers else DENSE_RULES):
            for expert in range(shape.num_experts or 1) if rule.is_expert else (0,):
                yield rule, layer, expert
    yield FINAL_NORM, 0, 0
    if not tied:
        yield OUTPUT, 0, 0


def find_rule(name: str, tied: bool) -> tuple[Rule, int, int]:
    """The rule, layer and expert of a Megatron parameter name with *global* indices.

    Raises:
        KeyError: no rule maps this parameter.
    """
    layer_match = re.match(r"decoder\.layers\.(\d+)\.", name)
    expert_match = re.search(r"\.experts\.linear_fc[12]\.weight(\d+)$", name)
    layer, expert = (int(m[1]) if m else 0 for m in (layer_match, expert_match))
    output = TIED_OUTPUT if tied else OUTPUT
    attention = (*ATTENTION_RULES, *QKV_BIAS_RULES, *QK_NORM_RULES)
    for rule in (*attention, *DENSE_RULES, *MOE_RULES, *SHARED_EXPERT_RULES, EMBEDDING, FINAL_NORM, output):
        if rule.names(layer, expert)[0] == name:
            return rule, layer, expert
    raise KeyError(f"no rule maps the Megatron parameter {name!r} to Hugging Face")


def shard(rule: Rule, full: Tensor, rank: int, parts: int) -> Tensor:
    """The part of a full tensor that tensor-parallel ``rank`` of ``parts`` holds."""
    if rule.shard_dim is None or parts == 1:
        return full
    if rule.gated:
        return torch.cat([half.chunk(parts, rule.shard_dim)[rank] for half in full.chunk(2, 0)], 0)
    return full.chunk(parts, rule.shard_dim)[rank]


def unshard(rule: Rule, shards: Sequence[Tensor]) -> Tensor:
    """The full tensor of all shards in rank order; the inverse of ``shard``."""
    if rule.shard_dim is None or len(shards) == 1:
        return shards[0]
    if rule.gated:
        halves = [s.chunk(2, 0) for s in shards]
        return torch.cat([torch.cat([h[i] for h in halves], rule.shard_dim) for i in range(2)], 0)
    return torch.cat(list(shards), rule.shard_dim)


def pad_vocabulary(full: Tensor, size: int) -> Tensor:
    """Zero rows up to ``size`` entries."""
    return torch.cat([full, full.new_zeros(size - full.shape[0], *full.shape[1:])]) if size > full.shape[0] else full
