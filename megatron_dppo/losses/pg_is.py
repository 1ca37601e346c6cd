"""PG-IS: the policy gradient with importance sampling, without a trust region.

    grad = - sum over t of  A_t r_t grad log pi(a_t | s_t),        r_t = pi / mu

Differentiated: log pi of the sampled token
Weight: pi / mu
Mask: none
Source: arXiv 2602.04879, section 5 (PG-IS)
"""

from __future__ import annotations

from typing import ClassVar, Literal

from megatron_dppo import losses
from megatron_dppo.config.loss_groups import RatioCap
from megatron_dppo.losses.rule import Loss


class PolicyGradient(RatioCap, Loss):
    """PG-IS. With ``ratio_cap`` it is PG-TIS, the default of ``cispo``.

    Example:
        >>> losses.show(PolicyGradient(), pi=[0.5, 0.9], mu=[0.4, 0.1], advantages=[1.0, -1.0])
        kept      True  True
        gradient -1.25  9.00
    """

    name: Literal["pg_is"] = "pg_is"

    can_center: ClassVar[bool] = True

    def decide(self, tokens: losses.Tokens) -> losses.Decision:
        """Keep every token."""
        return losses.weigh_by_ratio(tokens, losses.binary_tv(tokens.logprobs, tokens.rollout_logprobs))
