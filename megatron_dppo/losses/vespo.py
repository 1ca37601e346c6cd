"""VESPO: a smooth weight by the ratio of the whole sequence, in place of clipping.

    grad = - sum over t of  A phi(s) grad log pi(a_t | s_t),    phi(s) = s^k exp(lambda (1 - s))
    s = product over the sequence of pi / mu;  k and lambda by the sign of A

Differentiated: log pi of the sampled token
Weight: phi of the product of pi / mu over the sequence: 1 at s = 1, towards 0 for small and for large s
Mask: none
Source: arXiv 2602.10693, as TRL 0.27 (f2cd577, 24 July 2026) states it
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from megatron_dppo import losses
from megatron_dppo.config.loss import Form
from megatron_dppo.config.user_functions import FunctionNeeds
from megatron_dppo.losses.rule import Loss

_LOG_RATIO_LIMITS = (-18.42068074395237, 20.0)
"""Limits of log s, as in TRL: the logarithm of 1e-8, and 20. Beyond them phi is 0 to rounding."""


class VESPO(Loss):
    """VESPO. Its weight has no length bias: it reads the product of the ratios, not their mean.

    Example:
        The ratios 1.25 and 0.8 have the product 1, and phi(1) = 1.

        >>> losses.show(VESPO(), pi=[0.5, 0.4], mu=[0.4, 0.5], advantages=[1.0, 1.0])
        kept      True  True
        gradient -1.00 -1.00
    """

    name: Literal["vespo"] = "vespo"
    weight_power_low: float = Field(3.0, ge=0)
    """Exponent k of ``vespo`` for negative advantages."""
    weight_power_high: float = Field(2.0, ge=0)
    """Exponent k of ``vespo`` for positive advantages."""
    weight_decay_low: float = Field(2.0, gt=0)
    """Decay lambda of ``vespo`` for negative advantages."""
    weight_decay_high: float = Field(3.0, gt=0)
    """Decay lambda of ``vespo`` for positive advantages."""

    forms: ClassVar[tuple[Form, ...]] = ("reinforce",)

    @property
    def needs(self) -> FunctionNeeds:
        """Whole sequences."""
        return FunctionNeeds(sequences=True, zero_advantage=False)

    def decide(self, tokens: losses.Tokens) -> losses.Decision:
        """Keep every token, with the weight of its sequence."""
        log_ratio = losses.per_sequence(tokens.log_ratio, tokens.mask, tokens.sequences, "sum")
        log_ratio = log_ratio.clamp(*_LOG_RATIO_LIMITS)
        rising = tokens.advantages > 0
        power = log_ratio * self.weight_power_high
        power = power.where(rising, log_ratio * self.weight_power_low)
        above = -log_ratio.expm1()  # 1 - s
        decay = (above * self.weight_decay_high).where(rising, above * self.weight_decay_low)
        decision = losses.weigh_by_ratio(tokens, losses.binary_tv(tokens.logprobs, tokens.rollout_logprobs))
        return decision._replace(weight=(power + decay).exp())
