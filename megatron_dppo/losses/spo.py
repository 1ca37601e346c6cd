"""SPO: a quadratic penalty on the ratio in place of clipping; DRPO without the factor mu.

    loss = sum over t of  - A_t r_t + |A_t| (r_t - 1)^2 / (2 eps),        r_t = pi / mu
    grad = - sum over t of  A_t r_t (1 - sign(A_t) (r_t - 1) / eps) grad log pi(a_t | s_t)

Differentiated: log pi of the sampled token, with form = "ratio" the ratio r
Weight: pi / mu, less by how far the ratio has moved in the direction of the advantage; 0 at 1 + eps, negative beyond
Mask: none
Source: arXiv 2401.16025
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from megatron_dppo import losses
from megatron_dppo.config.loss_groups import RatioCap
from megatron_dppo.losses.rule import Loss

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_dppo.types import LossInputs


_LOG_RATIO_LIMIT = 20.0
"""Limit of the log ratio, as in the code of DRPO's authors."""


class SPO(RatioCap, Loss):
    """SPO. The weight of a rare token grows without bound: a small move of probability is a large ratio.

    Example:
        The second ratio is 1 + eps. The third is beyond it, so its update pulls the token back.

        >>> losses.show(SPO(), pi=[0.5, 0.6, 0.75], mu=[0.5, 0.5, 0.5], advantages=[1.0, 1.0, 1.0])
        kept      True  True  True
        gradient -1.00 -0.00  2.25
    """

    name: Literal["spo"] = "spo"
    ratio_cap: Annotated[float, Field(gt=0)] | Literal["off"] | None = None
    """Largest whole weight of ``spo``. null and ``off`` disable the cap."""
    ratio_range: float = Field(0.2, gt=0)
    """Epsilon of ``spo``: move of the ratio from 1 at which the weight is 0. DRPO's paper uses 12.5."""

    can_center: ClassVar[bool] = True

    @property
    def ratio_limits(self) -> tuple[float, float]:
        """Floor and cap of the weight, which may be negative."""
        return (float("-inf"), super().ratio_limits[1])

    def decide(self, tokens: losses.Tokens) -> losses.Decision:
        """Keep every token, with a weight that falls as its ratio moves outward."""
        decision = losses.weigh_by_ratio(tokens, losses.binary_tv(tokens.logprobs, tokens.rollout_logprobs))
        ratio = self._ratio(tokens)
        outward = (ratio - 1) * tokens.advantages.sign() / self.ratio_range
        return decision._replace(weight=ratio * (1 - outward))

    def terms(self, inputs: LossInputs, tokens: losses.Tokens, decision: losses.Decision) -> tuple[Tensor, Tensor]:
        """Report the value of the loss itself with ``form = "ratio"``."""
        keep, term = super().terms(inputs, tokens, decision)
        if self.resolved_form == "reinforce":
            return keep, term
        ratio = self._ratio(tokens)
        penalty = (ratio - 1).square() / (2 * self.ratio_range)
        return keep, losses.with_value(term, tokens.advantages.abs() * penalty - tokens.advantages * ratio, keep)

    @staticmethod
    def _ratio(tokens: losses.Tokens) -> Tensor:
        """Return pi / mu, limited so that its square is finite in fp32."""
        return tokens.log_ratio.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()
