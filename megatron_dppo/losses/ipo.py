"""IPO (prime-rl): mask tokens that have moved too far, whatever the direction of the update.

    grad = - sum over t of  A_t r_t keep_t grad log pi(a_t | s_t),        r_t = pi / mu
    keep_t = |pi - mu| <= (high if pi > mu else low)

Differentiated: log pi of the sampled token
Weight: pi / mu
Mask: total variation of pi from mu on the sampled token; updates of either direction
Source: prime-rl, pull requests 3418 and 3586
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from megatron_dppo import losses
from megatron_dppo.config.loss_groups import DivergenceThresholds, RatioCap
from megatron_dppo.losses.rule import Loss


class IPO(DivergenceThresholds, RatioCap, Loss):
    """IPO. ``divergence_threshold_low`` is the limit for pi < mu, ``divergence_threshold_high`` for pi > mu.

    Example:
        The second and the third token have moved 0.4. DPPO would keep the third, whose update leads back.

        >>> losses.show(IPO(), pi=[0.5, 0.9, 0.9], mu=[0.4, 0.5, 0.5], advantages=[1.0, 1.0, -1.0])
        kept      True False False
        gradient -1.25  0.00  0.00
    """

    name: Literal["ipo"] = "ipo"
    divergence_threshold_low: float | None = Field(None, gt=0)
    """Largest move of a token with pi < mu. null uses 0.3 for ``ipo``."""
    divergence_threshold_high: float | None = Field(None, gt=0)
    """Largest move of a token with pi > mu. null uses 0.3 for ``ipo``."""

    can_center: ClassVar[bool] = True

    @property
    def default_threshold(self) -> float:
        """Threshold on both sides where none is set."""
        return 0.3

    def decide(self, tokens: losses.Tokens) -> losses.Decision:
        """Mask tokens that are beyond the threshold of the side on which they are."""
        low, high = self.thresholds
        divergence = losses.binary_tv(tokens.logprobs, tokens.rollout_logprobs)
        keep = (divergence <= high).where(tokens.log_ratio > 0, divergence <= low)
        return losses.weigh_by_ratio(tokens, divergence, keep)
