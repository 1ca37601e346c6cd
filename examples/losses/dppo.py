"""DPPO-Binary-TV and DPPO-TopK-TV as custom losses: templates to start from.

A class has the form of the built-in losses (megatron_dppo/losses); its fields are keys of [loss]:

[loss]
name = "examples/losses/dppo.py:BinaryTV"
threshold = 0.15

A function gives the terms themselves; its arguments are options:

[loss]
name = "examples/losses/dppo.py:binary_tv"
options = { threshold = 0.15 }
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from megatron_dppo import LossInputs, losses
from megatron_dppo.losses import Decision, Tokens, needs, topk_tv
from megatron_dppo.losses.dppo import divergence_keep_mask


class BinaryTV(losses.Loss):
    """A mask and a weight of each token; the gradient is ``-A w M grad log pi``. No other inputs are needed."""

    threshold: float = Field(0.15, gt=0, le=1)
    """Trust region on both sides."""
    cap: float = Field(5.0, gt=0)
    """C in min(r, C)."""

    @property
    def ratio_limits(self) -> tuple[float, float]:
        """(floor, cap) of the weight."""
        return (0.0, self.cap)

    def decide(self, tokens: Tokens) -> Decision:
        """Drop tokens beyond the threshold whose update increases the divergence."""
        divergence = losses.binary_tv(tokens.logprobs, tokens.rollout_logprobs)
        outward = tokens.advantages * tokens.log_ratio > 0
        return losses.weigh_by_ratio(tokens, divergence, keep=~(outward & (divergence > self.threshold)))


@needs(zero_advantage=False)
def binary_tv(inputs: LossInputs, *, threshold: float = 0.15, cap: float = 5.0) -> tuple[Tensor, Tensor]:
    """Return the loss term and keep mask of each token, both ``[T]``, from pi and mu of the sampled token."""
    logprobs, mu = inputs.logprobs, inputs.rollout_logprobs
    moved = (logprobs.detach().exp() - mu.exp()).abs()
    outward = inputs.advantages * (logprobs.detach() - mu) > 0
    keep = ~(outward & (moved > threshold))
    weight = (logprobs.detach() - mu).exp().clamp(max=cap)
    return torch.where(keep, -inputs.advantages * weight * logprobs, 0.0), keep


@needs(topk=True, zero_advantage=False)
def topk_total_variation(inputs: LossInputs, *, threshold: float = 0.15, cap: float = 5.0) -> tuple[Tensor, Tensor]:
    """Return the same with the divergence over the Top-K of the rollout (``loss.topk`` ids), from built-in parts."""
    logprobs, mu = inputs.logprobs, inputs.rollout_logprobs
    divergence = topk_tv(
        inputs.topk_logprobs, inputs.rollout_topk_logprobs, inputs.topk_valid, inputs.topk_other_logprob
    )
    log_ratio = logprobs.detach() - mu
    keep = divergence_keep_mask(divergence, log_ratio, inputs.advantages, threshold, threshold)
    weight = log_ratio.exp().clamp(max=cap)
    return torch.where(keep, -inputs.advantages * weight * logprobs, 0.0), keep
