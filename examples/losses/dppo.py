"""DPPO-Binary-TV and DPPO-TopK-TV once more, as losses of one's own: what to start from.

[loss]
name = "examples/losses/dppo.py:binary_tv"
options = { threshold = 0.15 }
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dppo import LossInputs
from megatron_dppo.losses import divergence_keep_mask, needs, topk_tv


@needs(zero_advantage=False)
def binary_tv(inputs: LossInputs, *, threshold: float = 0.15, cap: float = 5.0) -> tuple[Tensor, Tensor]:
    """The term of each token ``[T]``, and which tokens it keeps; pi and mu of the sampled token are enough for it."""
    logprobs, mu = inputs.logprobs, inputs.rollout_logprobs
    moved = (logprobs.detach().exp() - mu.exp()).abs()
    outward = inputs.advantages * (logprobs.detach() - mu) > 0
    keep = ~(outward & (moved > threshold))
    weight = (logprobs.detach() - mu).exp().clamp(max=cap)
    return torch.where(keep, -inputs.advantages * weight * logprobs, 0.0), keep


@needs(topk=True, zero_advantage=False)
def topk_total_variation(inputs: LossInputs, *, threshold: float = 0.15, cap: float = 5.0) -> tuple[Tensor, Tensor]:
    """The same with the divergence over the rollout's Top-K (``loss.topk`` ids), by the package's own parts."""
    logprobs, mu = inputs.logprobs, inputs.rollout_logprobs
    divergence = topk_tv(
        inputs.topk_logprobs, inputs.rollout_topk_logprobs, inputs.topk_valid, inputs.topk_other_logprob
    )
    log_ratio = logprobs.detach() - mu
    keep = divergence_keep_mask(divergence, log_ratio, inputs.advantages, threshold, threshold)
    weight = log_ratio.exp().clamp(max=cap)
    return torch.where(keep, -inputs.advantages * weight * logprobs, 0.0), keep
