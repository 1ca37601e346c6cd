"""GSPO: PPO's surrogate on one ratio a sequence, the geometric mean of its tokens' ratios.

    loss = mean over sequences of mean over tokens of  max(-A s, -A clip(s, 1 - low, 1 + high))
    s = exp(mean over the sequence of log pi - log mu),  with the gradient of each token's own log pi

Differentiated: the sequence's ratio, through log pi of each token
Weight: geometric mean of pi / mu over the sequence
Mask: that mean, by sequence; outward updates
Source: arXiv 2507.18071
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from megatron_dppo import losses
from megatron_dppo.config.loss_groups import RatioClipping, SequenceMean
from megatron_dppo.losses.rule import Loss


class GSPO(RatioClipping, SequenceMean, Loss):
    """GSPO. It is defined with ``seq_mean_token_mean``. Its limits are tight, because the mean ratio moves little.

    Example:
        The ratios 1.25 and 0.8 have the geometric mean 1. The example omits the mean over the two tokens.

        >>> losses.show(GSPO(), pi=[0.5, 0.4], mu=[0.4, 0.5], advantages=[1.0, 1.0])
        kept      True  True
        gradient -1.00 -1.00
    """

    name: Literal["gspo"] = "gspo"
    clip_ratio_low: float | None = Field(None, gt=0, lt=1)
    """Sequences with negative advantage and s < 1 - low are masked. null uses 3e-4 for ``gspo``."""
    clip_ratio_high: float | None = Field(None, gt=0)
    """Sequences with positive advantage and s > 1 + high are masked. null uses 4e-4 for ``gspo``."""

    default_clip_ratios: ClassVar[tuple[float, float]] = (3e-4, 4e-4)

    def decide(self, tokens: losses.Tokens) -> losses.Decision:
        """Clip the ratio of the sequence."""
        # Every token carries s, with the gradient of its own log pi. Averaged over the sequence this is the gradient
        # of s.
        log_ratio = losses.per_sequence(tokens.log_ratio, tokens.mask, tokens.sequences, "mean")
        divergence = losses.binary_tv(tokens.logprobs, tokens.rollout_logprobs)
        return losses.clipped_surrogate(tokens, log_ratio, divergence, self.clip_ratios)
