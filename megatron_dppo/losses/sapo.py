"""SAPO: a soft gate on the ratio in place of clipping; the weight falls smoothly on both sides of pi = mu.

    loss = - sum over t of  A_t (4 / tau) sigmoid(tau (r_t - 1)),        r_t = pi / mu
    grad = - sum over t of  A_t 4 p (1 - p) r_t grad log pi(a_t | s_t),  p = sigmoid(tau (r_t - 1))

Differentiated: log pi of the sampled token
Weight: pi / mu times a gate, 1 at pi = mu and towards 0 for larger and smaller ratios
Mask: none
Source: arXiv 2511.20347
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from megatron_dppo import losses
from megatron_dppo.config.loss import Form
from megatron_dppo.config.loss_groups import RatioCap
from megatron_dppo.losses.rule import Loss


class SAPO(RatioCap, Loss):
    """SAPO. Negative advantages have the steeper gate, because their updates spread over the vocabulary.

    Example:
        Ratios 1 and 2: p = sigmoid(1) = 0.731, and 4 p (1 - p) = 0.786.

        >>> losses.show(SAPO(), pi=[0.5, 0.8], mu=[0.5, 0.4], advantages=[1.0, 1.0])
        kept      True  True
        gradient -1.00 -1.57
    """

    name: Literal["sapo"] = "sapo"
    gate_temperature_low: float = Field(1.05, gt=0)
    """Gate temperature tau for negative advantages (``tau_neg``). A larger value is closer to clipping."""
    gate_temperature_high: float = Field(1.0, gt=0)
    """Gate temperature tau for positive advantages (``tau_pos``)."""

    forms: ClassVar[tuple[Form, ...]] = ("reinforce",)
    can_center: ClassVar[bool] = True

    def decide(self, tokens: losses.Tokens) -> losses.Decision:
        """Keep every token, with the gated weight."""
        decision = losses.weigh_by_ratio(tokens, losses.binary_tv(tokens.logprobs, tokens.rollout_logprobs))
        above = decision.weight - 1  # r - 1
        scaled = (above * self.gate_temperature_high).where(tokens.advantages > 0, above * self.gate_temperature_low)
        # 1 - p as sigmoid(-x): a difference would lose its digits where p is close to 1.
        gate = 4 * scaled.sigmoid() * (-scaled).sigmoid()
        return decision._replace(weight=decision.weight * gate)
