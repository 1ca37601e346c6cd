"""What a token costs, for dealing samples to ranks."""

from __future__ import annotations

from typing import Any

from megatron_dppo.hf import routing_shape


def attention_length(hf_config: Any) -> float:
    """The length at which a sequence's attention (causal) takes as many FLOPs as all matrices; 15.5k for Qwen3-30B-A3B.

    A weight is one multiplication a token, a pair of positions two for each head and dimension; backward doubles both.
    """
    heads, groups, hidden = hf_config.num_attention_heads, hf_config.num_key_value_heads, hf_config.hidden_size
    dim = getattr(hf_config, "head_dim", None) or hidden // heads
    dense = 3 * hidden * hf_config.intermediate_size
    layers, of_layer = hf_config.num_hidden_layers, 2 * hidden * dim * (heads + groups)
    shape = routing_shape(hf_config)
    num_dense = layers if shape is None else len(shape.dense_layers)
    weights = layers * of_layer + num_dense * dense + hidden * hf_config.vocab_size
    if shape is not None:
        experts = shape.topk * hf_config.moe_intermediate_size
        shared = getattr(hf_config, "shared_expert_intermediate_size", 0)
        weights += (layers - num_dense) * hidden * (3 * (experts + shared) + shape.num_experts)
    return weights / (layers * heads * dim)
