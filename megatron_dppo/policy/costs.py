"""What a token costs, for dealing samples to ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_dppo.config.layout import ModelShape
from megatron_dppo.families import family_of
from megatron_dppo.hf import model_shape


def attention_length(hf_config: Any) -> float:
    """The length at which a sequence's attention (causal) takes as many FLOPs as all matrices; 15.5k for Qwen3-30B-A3B.

    A weight is one multiplication a token, a pair of positions two for each head and dimension; backward doubles both.
    """
    shape = model_shape(hf_config)
    own, hidden, layers = family_of(hf_config).fields(hf_config, shape), shape.hidden_size, shape.num_layers
    of_layer, of_pair = _latent(own, shape) if shape.has_latent_attention else _grouped(own, shape)
    num_dense = layers if shape.num_experts is None else len(shape.dense_layers)
    weights = layers * of_layer + num_dense * 3 * hidden * hf_config.intermediate_size + hidden * shape.vocab_size
    if shape.num_experts is not None:
        experts = own["moe_router_topk"] * own["moe_ffn_hidden_size"]
        shared = own.get("moe_shared_expert_intermediate_size", 0)
        weights += (layers - num_dense) * hidden * (3 * (experts + shared) + shape.num_experts)
    return weights / (layers * of_pair / 2)


def _grouped(own: Mapping[str, Any], shape: ModelShape) -> tuple[int, int]:
    """The weights of a layer's attention, and the multiplications of a pair of positions."""
    heads, dim = shape.num_attention_heads, own["kv_channels"]
    return 2 * shape.hidden_size * dim * (heads + shape.num_query_groups), 2 * heads * dim


def _latent(own: Mapping[str, Any], shape: ModelShape) -> tuple[int, int]:
    """The same of latent attention, whose keys and values are made of latents."""
    heads, hidden, keys, values = shape.num_attention_heads, shape.hidden_size, own["kv_lora_rank"], own["v_head_dim"]
    rotated, plain, queries = own["qk_pos_emb_head_dim"], own["qk_head_dim"], own["q_lora_rank"]
    of_queries = heads * (plain + rotated)
    weights = hidden * of_queries if queries is None else queries * (hidden + of_queries)
    weights += hidden * (keys + rotated) + keys * heads * (plain + values) + heads * values * hidden
    return weights, of_queries + heads * values
