"""DRPO: a quadratic penalty in place of the mask; beyond the threshold the gradient turns around.

    loss = sum over t of  - A_t r_t + |A_t| mu_t (r_t - 1)^2 / (2 delta)
    grad = - sum over t of  A_t r_t (1 - sign(A_t) (pi - mu) / delta) grad log pi(a_t | s_t)

Differentiated: log pi of the sampled token
Weight: pi / mu, less by how far pi has moved in the direction of the advantage; 0 at the threshold, negative beyond
Mask: none
Source: arXiv 2606.09821
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from megatron_dppo import losses
from megatron_dppo.config.loss import Form
from megatron_dppo.config.loss_groups import DivergenceThresholds, RatioCap
from megatron_dppo.losses.parts.loss import Loss

if TYPE_CHECKING:
    from megatron_dppo.losses import Decision, Tokens


class DRPO(DivergenceThresholds, RatioCap, Loss):
    """DRPO. ``ratio_cap`` limits the whole weight; the thresholds are differences of probability.

    Example:
        The second token is at the threshold. The third is beyond it, so its update pulls it back.

        >>> losses.show(DRPO(), pi=[0.5, 0.65, 0.8], mu=[0.5, 0.5, 0.5], advantages=[1.0, 1.0, 1.0])
        kept      True  True  True
        gradient -1.00  0.00  1.60
    """

    name: Literal["drpo"] = "drpo"
    ratio_cap: Annotated[float, Field(gt=0)] | Literal["off"] | None = None
    """Largest whole weight of ``drpo``. null and ``off`` disable the cap."""

    forms: ClassVar[tuple[Form, ...]] = ("reinforce",)
    can_center: ClassVar[bool] = True

    @property
    def is_total_variation(self) -> bool:
        """Always False: the thresholds are a scale, not a limit."""
        return False

    @property
    def ratio_limits(self) -> tuple[float, float]:
        """Floor and cap of the weight, which may be negative."""
        return (float("-inf"), super().ratio_limits[1])

    def decide(self, tokens: Tokens) -> Decision:
        """Keep every token, with a weight that falls as the token moves outward."""
        low, high = self.thresholds
        moved = tokens.logprobs.detach().exp() - tokens.rollout_logprobs.exp()
        # 1 at the threshold of the advantage's side, negative if the token has moved against its advantage.
        outward = (moved / high).where(tokens.advantages > 0, -moved / low)
        decision = losses.weigh_by_ratio(tokens, losses.binary_tv(tokens.logprobs, tokens.rollout_logprobs))
        return decision._replace(weight=decision.weight * (1 - outward))
