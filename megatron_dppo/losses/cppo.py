"""CPPO: DPPO with thresholds by position, and a budget for the divergences of a prefix.

    grad = - sum over t of  A_t r_t keep_t grad log pi(a_t | s_t),        r_t = pi / mu
    keep_t = not (outward and w_t D_t > min(delta, delta + b W_t - S_t))
    w_t falls from 1 to position_floor; W_t and S_t are the sums of w and of w D over the tokens before t;
    b is the 90th percentile of the sequence's D, at least prefix_budget and at most prefix_budget_max

Differentiated: log pi of the sampled token
Weight: pi / mu
Mask: weighted total variation of pi from mu within the budget of its prefix, by token; outward updates
Source: arXiv 2606.10968, equations 8 to 10 and 22
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from megatron_dppo import losses
from megatron_dppo.config.loss_groups import DivergenceThresholds, RatioCap
from megatron_dppo.config.user_functions import FunctionNeeds
from megatron_dppo.losses.rule import Loss

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_dppo.config.loss import TopKSummary


class CPPO(DivergenceThresholds, RatioCap, Loss):
    """CPPO: the more the tokens before have moved, the less a token may move.

    Example:
        Each token has moved 0.12, less than 0.15. With b = 0.04 the second, of weight 0.9, counts 0.108 against
        min(0.15, 0.15 + 0.04 - 0.12) = 0.07. For the third no budget is left.

        >>> losses.show(CPPO(), pi=[0.52, 0.52, 0.52], mu=[0.4, 0.4, 0.4], advantages=[1.0, 1.0, 1.0])
        kept      True False False
        gradient -1.30  0.00  0.00
    """

    name: Literal["cppo"] = "cppo"
    divergence: Literal["binary", "topk"] | None = None
    """Total variation on the sampled token or on the rollout's Top-K. null uses ``binary`` for ``cppo``."""
    position_floor: float = Field(0.8, gt=0, le=1)
    """Weight of a response's last divergence; the first has weight 1."""
    prefix_budget: float = Field(0.02, gt=0)
    """Smallest mean of the weighted divergences that any prefix may have."""
    prefix_budget_max: float | None = Field(None, gt=0)
    """Largest such mean. The mean of a sequence is the 90th percentile of its divergences, at most this value. null
    uses twice ``prefix_budget``."""

    @property
    def needs(self) -> FunctionNeeds:
        """Whole sequences, and the Top-K if the divergence is measured on it."""
        return FunctionNeeds(sequences=True, topk=self.divergence == "topk", zero_advantage=False)

    @property
    def topk_summary(self) -> TopKSummary | None:
        """Sums over the slots are enough: only the divergence is read."""
        return "divergence"

    @property
    def prefix_budgets(self) -> tuple[float, float]:
        """Smallest and largest budget, with the default filled in."""
        largest = self.prefix_budget_max
        return (self.prefix_budget, 2 * self.prefix_budget if largest is None else largest)

    def resolved_defaults(self) -> dict[str, Any]:
        """Add the largest budget and the divergence."""
        values = {"prefix_budget_max": self.prefix_budgets[1], "divergence": "binary"}
        return values | super().resolved_defaults()

    def check(self) -> None:
        """Check that the budgets are in order."""
        smallest, largest = self.prefix_budgets
        if smallest > largest:
            raise ValueError(
                f"prefix_budget = {smallest} is above prefix_budget_max = {largest}; the budget of a sequence lies "
                "between them. Fix: lower prefix_budget."
            )
        super().check()

    def decide(self, tokens: losses.Tokens) -> losses.Decision:
        """Mask outward updates of tokens that are beyond their budget."""
        divergence = self._divergence(tokens)
        keep = losses.prefix_keep_mask(
            divergence,
            tokens.log_ratio,
            tokens.advantages,
            tokens.mask,
            tokens.sequences,
            thresholds=self.thresholds,
            floor=self.position_floor,
            budget=self.prefix_budgets,
        )
        return losses.weigh_by_ratio(tokens, divergence, keep)

    def _divergence(self, tokens: losses.Tokens) -> Tensor:
        if self.divergence == "topk":
            return tokens.topk_set.divergence("tv").to(tokens.log_ratio.dtype)
        return losses.binary_tv(tokens.logprobs, tokens.rollout_logprobs)
