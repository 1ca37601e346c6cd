"""PPO: the clipped surrogate, optionally with dual clip; decoupled into a trust region and a correction to the engine.

    loss = sum over t of  max(-A_t r_t, -A_t clip(r_t, 1 - low, 1 + high)),    at most -A_t c for A_t < 0 (dual clip)
    ppo_clip: r_t = pi / mu.    ppo_decoupled: r_t = pi / pi', and the loss of a token times pi' / mu

Differentiated: the ratio r
Weight: pi / mu, the decoupled form as pi / pi' times pi' / mu (which may be truncated)
Mask: ratio to mu, or to pi' (recomputed by the trainer), by token; outward updates
Source: arXiv 1707.06347, dual clip 1912.09729, decoupled 2110.00641
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from megatron_dppo import losses
from megatron_dppo.config.loss import Form
from megatron_dppo.config.loss_groups import RatioClipping
from megatron_dppo.losses.adaptive import AdaptiveThresholds
from megatron_dppo.losses.rule import Loss


class PPO(AdaptiveThresholds, RatioClipping, Loss):
    """PPO on the ratio pi / mu.

    Example:
        Ratios 1.25 and 1.8 against 1.28.

        >>> losses.show(PPO(), pi=[0.5, 0.9], mu=[0.4, 0.5], advantages=[1.0, 1.0])
        kept      True False
        gradient -1.25  0.00
    """

    name: Literal["ppo_clip"] = "ppo_clip"
    dual_clip: float | None = Field(None, gt=1)
    """Tokens with negative advantage and r above this value are masked. null disables the limit."""

    forms: ClassVar[tuple[Form, ...]] = ("ratio",)
    can_center: ClassVar[bool] = True

    def decide(self, tokens: losses.Tokens) -> losses.Decision:
        """Clip the ratio."""
        divergence = losses.binary_tv(tokens.logprobs, tokens.rollout_logprobs)
        limits = losses.adapted_limits(self.clip_ratios, tokens, self)
        return losses.clipped_surrogate(tokens, tokens.log_ratio, divergence, limits, self.dual_clip)


class DecoupledPPO(RatioClipping, Loss):
    """PPO on the ratio pi / pi', times pi' / mu, which ``mismatch`` limits.

    Example:
        The first token has pi = 1.25 pi', and pi' = mu. The second has pi = 1.67 pi'.

        >>> losses.show(DecoupledPPO(), pi=[0.5, 0.5], mu=[0.4, 0.4], recomputed=[0.4, 0.3], advantages=[1.0, 1.0])
        kept      True False
        gradient -1.25  0.00
    """

    name: Literal["ppo_decoupled"] = "ppo_decoupled"
    dual_clip: float | None = Field(None, gt=1)
    """Tokens with negative advantage and r above this value are masked. null disables the limit."""

    forms: ClassVar[tuple[Form, ...]] = ("ratio",)
    mismatch_uses_recomputed: ClassVar[bool] = True
    truncates_mismatch: ClassVar[bool] = True

    def decide(self, tokens: losses.Tokens) -> losses.Decision:
        """Clip pi / pi', and correct for the difference of trainer and engine by pi' / mu."""
        mismatch = losses.mismatch_log_ratio(tokens, self).exp()
        if self.mismatch == "truncate":
            mismatch = mismatch.clamp(*self.mismatch_limits)
        divergence = losses.binary_tv(tokens.logprobs, tokens.rollout_logprobs)
        clipped = losses.clipped_surrogate(
            tokens, tokens.recomputed_log_ratio, divergence, self.clip_ratios, self.dual_clip
        )
        return clipped._replace(weight=clipped.weight * mismatch, clipped_weight=clipped.clipped_weight * mismatch)
