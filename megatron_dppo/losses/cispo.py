"""CISPO: the policy gradient with importance weights that are clipped, so that every token keeps a gradient.

    grad = - sum over t of  A_t clip(r_t, floor, C) grad log pi(a_t | s_t),        r_t = pi / mu

Differentiated: log pi of the sampled token
Weight: pi / mu, capped (C = 5), optionally floored
Mask: none
Source: arXiv 2506.13585; capped alone it is PG-TIS of arXiv 2602.04879
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megatron_dppo import losses
from megatron_dppo.config.loss_groups import RatioCap
from megatron_dppo.losses.rule import Loss


class CISPO(RatioCap, Loss):
    """CISPO: no token is masked, and no weight is above the cap.

    Example:
        Ratios 1.25 and 9, limited to 5.

        >>> losses.show(CISPO(), pi=[0.5, 0.9], mu=[0.4, 0.1], advantages=[1.0, -1.0])
        kept      True  True
        gradient -1.25  5.00
    """

    name: Literal["cispo"] = "cispo"
    ratio_cap: Annotated[float, Field(gt=0)] | Literal["off"] | None = None
    """Cap C of the weight min(r, C). ``off`` disables it. null uses 5 for ``cispo``."""
    ratio_floor: float | None = Field(None, gt=0)
    """Smallest weight: r is raised to this value (the two-sided form). null disables the floor."""

    default_cap: ClassVar[float] = 5.0
    can_center: ClassVar[bool] = True

    @property
    def ratio_limits(self) -> tuple[float, float]:
        """Floor and cap of the weight; 0 and infinity if there is none."""
        return (self.ratio_floor or 0.0, super().ratio_limits[1])

    def check(self) -> None:
        """Check that the floor is below the cap."""
        floor, cap = self.ratio_limits
        if floor > cap:
            raise ValueError(f"ratio_floor = {floor} is above ratio_cap = {cap}. Fix: lower ratio_floor.")
        super().check()

    def decide(self, tokens: losses.Tokens) -> losses.Decision:
        """Keep every token."""
        return losses.weigh_by_ratio(tokens, losses.binary_tv(tokens.logprobs, tokens.rollout_logprobs))
