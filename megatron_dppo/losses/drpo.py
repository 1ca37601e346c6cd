"""DRPO: a quadratic penalty in place of the mask; beyond the threshold the gradient turns around.

    loss = sum over t of  - A_t r_t + |A_t| mu_t (r_t - 1)^2 / (2 delta)
    grad = - sum over t of  A_t r_t (1 - sign(A_t) (pi - mu) / delta) grad log pi(a_t | s_t)

Differentiated: log pi of the sampled token, with form = "ratio" the ratio r
Weight: pi / mu, less by how far pi has moved in the direction of the advantage; 0 at the threshold, negative beyond
Mask: none
Source: arXiv 2606.09821, equation 8; its authors' code in Tencent-Hunyuan/UniRL

The default of delta, 12.5, is that of the authors: the weight stays within 1 +- 0.08, and no update turns around. It
was also the best of four values in the wind tunnel's search, where 0.15, DPPO's threshold, learned least
(docs/results/windtunnel/README.md). The alias ``drpo/paper`` has all settings of the authors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from megatron_dppo import losses
from megatron_dppo.config.loss_groups import DivergenceThresholds, RatioCap
from megatron_dppo.losses.rule import Loss

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_dppo.types import LossInputs


class DRPO(DivergenceThresholds, RatioCap, Loss):
    """DRPO. ``ratio_cap`` limits the whole weight; the thresholds are differences of probability.

    Example:
        The second token is at the threshold. The third is beyond it, so its update pulls it back.

        >>> drpo = DRPO(divergence_threshold_high=0.15)
        >>> losses.show(drpo, pi=[0.5, 0.65, 0.8], mu=[0.5, 0.5, 0.5], advantages=[1.0, 1.0, 1.0])
        kept      True  True  True
        gradient -1.00  0.00  1.60
    """

    name: Literal["drpo"] = "drpo"
    ratio_cap: Annotated[float, Field(gt=0)] | Literal["off"] | None = None
    """Largest whole weight of ``drpo``. null and ``off`` disable the cap."""

    divergence_threshold_low: float | None = Field(None, gt=0)
    """Delta for negative advantages: move of probability at which the weight is 0. null uses 12.5 for ``drpo``."""
    divergence_threshold_high: float | None = Field(None, gt=0)
    """Delta for positive advantages: move of probability at which the weight is 0. null uses 12.5 for ``drpo``."""

    can_center: ClassVar[bool] = True

    @property
    def default_threshold(self) -> float:
        """Delta in both directions if none is set."""
        return 12.5

    @property
    def is_total_variation(self) -> bool:
        """Always False: the thresholds are a scale, not a limit."""
        return False

    @property
    def ratio_limits(self) -> tuple[float, float]:
        """Floor and cap of the weight, which may be negative."""
        return (float("-inf"), super().ratio_limits[1])

    def decide(self, tokens: losses.Tokens) -> losses.Decision:
        """Keep every token, with a weight that falls as the token moves outward."""
        low, high = self.thresholds
        moved = tokens.logprobs.detach().exp() - tokens.rollout_logprobs.exp()
        # 1 at the threshold of the advantage's side, negative if the token has moved against its advantage.
        outward = (moved / high).where(tokens.advantages > 0, -moved / low)
        decision = losses.weigh_by_ratio(tokens, losses.binary_tv(tokens.logprobs, tokens.rollout_logprobs))
        return decision._replace(weight=decision.weight * (1 - outward))

    def terms(self, inputs: LossInputs, tokens: losses.Tokens, decision: losses.Decision) -> tuple[Tensor, Tensor]:
        """Report the value of the loss itself with ``form = "ratio"``."""
        keep, term = super().terms(inputs, tokens, decision)
        if self.resolved_form == "reinforce":
            return keep, term
        low, high = self.thresholds
        moved = tokens.logprobs.detach().exp() - tokens.rollout_logprobs.exp()
        # mu (r - 1)^2 = (pi - mu) (r - 1)
        penalty = moved * (tokens.ratio - 1) / 2
        penalty = (penalty / high).where(tokens.advantages > 0, penalty / low)
        return keep, losses.with_value(term, tokens.advantages.abs() * penalty - tokens.advantages * tokens.ratio, keep)
