"""Tiny models of each family of ``megatron_dppo.hf.families``, as transformers makes them, in float64 throughout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_dppo.hf.folder import build_hf_model

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_SIZES: dict[str, Any] = dict(
    vocab_size=117,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.08,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
)
_EXPERTS: dict[str, Any] = dict(
    moe_intermediate_size=48,
    n_routed_experts=8,
    n_shared_experts=2,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
    num_mtp_layers=0,
    routed_scaling_factor=2.5,
)
_LATENT: dict[str, Any] = _EXPERTS | dict(
    num_key_value_heads=4, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12
)
MODEL_TYPES = {"moonlight": "deepseek_v3"}
"""Of models that have another name here."""
OWN: dict[str, dict[str, Any]] = {
    # A head's slowest pair turns by 0.001 a token: scaling by 32 changes what a test of 16 tokens sees.
    "llama": {
        "head_dim": 16,
        "max_position_embeddings": 16384,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e5, "factor": 32.0, **_LLAMA3},
    },
    "glm4_moe": _EXPERTS
    | {
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "routed_scaling_factor": 1.7,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "deepseek_v3": _LATENT
    | {
        "q_lora_rank": 32,
        "n_group": 2,
        "topk_group": 1,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 0.9}
        | {"original_max_position_embeddings": 32, "beta_fast": 4, "beta_slow": 1},
    },
    "moonlight": _LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1},
    "mistral": {"head_dim": 16, "sliding_window": None},
    "qwen2": {},
}
"""What differs from the common sizes."""


def family_config(family: str, *, tied: bool = False) -> Any:
    """The configuration of a small model."""
    from transformers import AutoConfig

    return AutoConfig.for_model(MODEL_TYPES.get(family, family), **_SIZES | OWN[family], tie_word_embeddings=tied)


def in_float64(model: Any) -> Any:
    """A float64 copy that computes in float64 throughout: transformers' norms and router round to fp32."""
    config = type(model.config)(**model.config.to_dict())
    config._experts_implementation = "eager"  # the grouped one has no float64
    copy = build_hf_model(config, torch.float64)
    copy.load_state_dict(model.state_dict())
    for module in copy.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda x, m=module: _norm(m, x)
        elif type(module).__name__.lower().endswith("topkrouter"):
            module.forward = lambda x, m=module: _route(m, x)
    return copy


def _norm(module: Any, x: Tensor) -> Tensor:
    return module.weight * x * (x.square().mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()


def _route(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = x.reshape(-1, module.hidden_dim) @ module.weight.T
    scores, order = router_scores(module, logits)
    indices = order.topk(module.top_k, dim=-1).indices
    return logits, combined(module, scores, indices), indices


def router_scores(module: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
    """``[tokens, experts]`` by which a router of transformers weighs experts, and by which it chooses them."""
    bias = getattr(module, "e_score_correction_bias", None)
    if bias is None:
        return logits.softmax(-1), logits.softmax(-1)
    scores = logits.sigmoid()
    grouped = (scores + bias).unflatten(-1, (module.num_group, -1))
    ranks = grouped.topk(2, -1).values.sum(-1).argsort(-1, descending=True)
    losers = ranks[:, module.topk_group :, None].expand(-1, -1, grouped.shape[-1])
    return scores, grouped.scatter(1, losers, -torch.inf).flatten(1)


def combined(module: Any, scores: Tensor, experts: Tensor) -> Tensor:
    """``[tokens, k]`` that the outputs of the ``experts`` are multiplied by."""
    weights = scores.gather(1, experts)
    if module.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * getattr(module, "routed_scaling_factor", 1.0)
