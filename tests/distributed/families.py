"""Tiny models of each family of ``megatron_dppo.hf.families``, as transformers makes them, in float64 throughout."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.hf.families import FAMILIES, Family
from megatron_dppo.hf.folder import build_hf_model

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
TINY: Mapping[str, tuple[Family, Mapping[str, Any]]] = {
    name: (family, keys)
    for family in FAMILIES.values()
    for name, keys in {family.model_type: family.tiny, **family.variants}.items()
}
"""Family, and what differs from the common sizes, of each tiny model."""

LINEAR = ("qwen3_next", "qwen3_5_moe_text")
"""Families with linear attention."""


def family_config(family: str, *, tied: bool = False) -> Any:
    """The configuration of a tiny model."""
    from transformers import AutoConfig

    return AutoConfig.for_model(TINY[family][0].model_type, **{**_SIZES, **TINY[family][1]}, tie_word_embeddings=tied)


def in_float64(model: Any) -> Any:
    """A float64 copy that computes in float64 throughout: transformers' norms and router round to fp32."""
    config = type(model.config)(**model.config.to_dict())
    config._experts_implementation = "eager"  # the grouped one has no float64
    copy = build_hf_model(config, torch.float64)
    copy.load_state_dict(model.state_dict())
    if hasattr(config, "linear_num_key_heads"):
        return _delta_in_float64(copy)
    for module in copy.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda x, m=module: _norm(m, x)
        # The router of gpt-oss has a bias, and rounds nothing.
        elif type(module).__name__.lower().endswith("topkrouter") and not hasattr(module, "bias"):
            module.forward = lambda x, *bias, m=module: _route(m, x, *bias)
    return copy


def _delta_in_float64(model: Any) -> Any:
    """transformers rounds to fp32 in ``float()``, softmax and its chunked rule. Here none does, and the rule has no
    chunks."""
    modeling, forward = sys.modules[type(model).__module__], model.forward
    to_fp32, softmax = torch.Tensor.float, torch.softmax
    for module in model.modules():
        if type(module).__name__.endswith("RMSNormGated"):
            module.forward = lambda x, gate, m=module: _norm(m, x) * torch.nn.functional.silu(gate)
    exact: list[tuple[Any, str, Any]] = [
        # Positions are integers: rotary angles are fp32 on both sides.
        (torch.Tensor, "float", lambda x: x if x.is_floating_point() else to_fp32(x)),
        (torch.nn.functional, "softmax", lambda x, dim=-1, dtype=None: softmax(x, dim)),
        (modeling, "torch_chunk_gated_delta_rule", recurrent_rule),
    ]

    def run(*args: Any, **kwargs: Any) -> Any:
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in exact]
        try:
            for owner, name, function in exact:
                setattr(owner, name, function)
            return forward(*args, **kwargs)
        finally:
            for owner, name, function in before:
                setattr(owner, name, function)

    model.forward = run
    return model


def recurrent_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """The gated delta rule as it is defined, one token after another: the output and the last state."""
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    state, outputs = v.new_zeros(*v.shape[:1], v.shape[2], k.shape[-1], v.shape[-1]), []
    for t in range(v.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        error = (v[:, t] - (state * k[:, t, :, :, None]).sum(-2)) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * error[..., None, :]
        outputs.append((state * q[:, t, :, :, None]).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, 1), state


def _norm(module: Any, x: Tensor) -> Tensor:
    return module.weight * x * (x.square().mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()


def _route(module: Any, x: Tensor, *bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = x.reshape(-1, module.hidden_dim) @ module.weight.T
    scores, order = router_scores(module, logits, *bias)
    indices = order.topk(module.top_k, dim=-1).indices
    return logits, combined(module, scores, indices), indices


def router_scores(module: Any, logits: Tensor, block_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``[tokens, experts]`` by which a router of transformers weighs experts, and by which it chooses them."""
    bias = getattr(module, "e_score_correction_bias", block_bias)
    if bias is None:
        return logits.softmax(-1), logits.softmax(-1)
    scores = logits.sigmoid()
    if block_bias is not None:  # MiniMax-M2 has no groups
        return scores, scores + bias
    grouped = (scores + bias).unflatten(-1, (module.num_group, -1))
    ranks = grouped.topk(2, -1).values.sum(-1).argsort(-1, descending=True)
    losers = ranks[:, module.topk_group :, None].expand(-1, -1, grouped.shape[-1])
    return scores, grouped.scatter(1, losers, -torch.inf).flatten(1)


def combined(module: Any, scores: Tensor, experts: Tensor) -> Tensor:
    """``[tokens, k]`` that the outputs of the ``experts`` are multiplied by."""
    weights = scores.gather(1, experts)
    if getattr(module, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * getattr(module, "routed_scaling_factor", 1.0)
