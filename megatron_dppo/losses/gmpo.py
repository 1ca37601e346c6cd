"""GMPO: the geometric mean of clipped token ratios as the ratio of a sequence.

    loss = - mean over sequences of  A exp(mean over tokens of l_t)
    l_t = log pi - log mu, clipped to high for A > 0 and to -low for A < 0
    keep_t = not (A > 0 and l_t > high, or A < 0 and l_t < -low)

Differentiated: the sequence's geometric mean, through log pi of each token that is not clipped
Weight: geometric mean over the sequence of pi / mu, each clipped to [exp(-low), exp(high)] on A's outward side
Mask: log ratio to mu, by token; outward updates
Source: arXiv 2507.20673 and its authors' code (callsys/GMPO 205b2bf); verl's ``geo_mean``
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_dppo import losses
from megatron_dppo.config.loss_groups import SequenceMean
from megatron_dppo.losses.rule import Loss


class GMPO(SequenceMean, Loss):
    """GMPO. It is defined with ``seq_mean_token_mean``. The clipping is by token and wide; ``gspo`` clips the mean.

    Example:
        The log ratios are 0.22 and 0.69, and the second is clipped to 0.4: the mean is exp(0.31) = 1.37. The example
        omits the mean over the two tokens.

        >>> losses.show(GMPO(), pi=[0.5, 0.8], mu=[0.4, 0.4], advantages=[1.0, 1.0])
        kept      True False
        gradient -1.37  0.00
    """

    name: Literal["gmpo"] = "gmpo"
    log_clip_low: float = Field(0.4, gt=0)
    """Tokens of ``gmpo`` with negative advantage and log r < -low are clipped."""
    log_clip_high: float = Field(0.4, gt=0)
    """Tokens of ``gmpo`` with positive advantage and log r > high are clipped."""

    def decide(self, tokens: losses.Tokens) -> losses.Decision:
        """Clip single tokens, and give all tokens of a sequence the geometric mean."""
        # The gradient of exp(mean l) is that number times the mean of the gradients of l_t; a clipped l_t has none.
        rising = tokens.advantages > 0
        clipped = tokens.log_ratio.clamp(max=self.log_clip_high)
        clipped = clipped.where(rising, tokens.log_ratio.clamp(min=-self.log_clip_low))
        keep = (clipped == tokens.log_ratio) | (tokens.advantages == 0)
        mean = losses.per_sequence(clipped, tokens.mask, tokens.sequences, "mean").exp()
        divergence = losses.binary_tv(tokens.logprobs, tokens.rollout_logprobs)
        # A clipped token reports the same value as an unclipped one, so that the loss is that of the sequence.
        return losses.weigh_by_ratio(tokens, divergence, keep)._replace(weight=mean, clipped_weight=mean)
