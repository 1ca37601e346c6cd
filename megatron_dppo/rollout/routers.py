"""The routers of transformers models: what the outputs of given experts are multiplied by."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def combine_weights(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    """fp32 ``[tokens, k]`` of the ``experts [tokens, k]``, from the router's ``logits [tokens, E]``, by its own rule.

    A router with a bias (``e_score_correction_bias``) chooses by it, and weighs by sigmoids without it.
    """
    scores = logits.float()
    scores = scores.sigmoid() if hasattr(router, "e_score_correction_bias") else scores.softmax(-1)
    weights = scores.gather(1, experts.long())
    if router.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * getattr(router, "routed_scaling_factor", 1.0)
