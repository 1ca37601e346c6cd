"""Thresholds that differ by token: less for old tokens, and for tokens whose mismatch is an outlier of the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from megatron_dppo.config.loss import Statistic
from megatron_dppo.losses.rule import Loss

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_dppo.losses.statistics import BatchTokens
    from megatron_dppo.losses.tokens import Tokens

_SCALE_FLOOR = 1e-6
"""Smallest scale of the mismatch: without any, pi and mu differ by rounding only, and nothing is an outlier."""


class AdaptiveThresholds(Loss):
    """Keys of thresholds that differ by token: by its age, and by its mismatch (a reading of SAT, arXiv 2607.18722)."""

    threshold_age: float | None = Field(None, gt=0)
    """Age in updates at which the thresholds of a token are halved: they are divided by 1 + age / this. Ours. null:
    the age has no effect."""
    threshold_knee: float | None = Field(None, gt=0)
    """Mismatch beyond which the thresholds of a token shrink: abs(log r) in units of its median over the step. Our
    reading of SAT; it costs a forward pass a step. null: they do not shrink."""
    threshold_floor: float = Field(0.25, gt=0, le=1)
    """Smallest factor of the thresholds with ``threshold_knee``."""

    def unused_keys(self) -> dict[str, str]:
        """Add the floor if there is no knee."""
        unused = super().unused_keys()
        return unused if self.threshold_knee is not None else unused | {"threshold_floor": "threshold_knee"}

    def input_reasons(self) -> dict[str, str]:
        """Add the ages."""
        reasons = super().input_reasons()
        return reasons if self.threshold_age is None else reasons | {"ages": "loss.threshold_age"}

    def step_statistics(self) -> Mapping[str, Statistic]:
        """Add the scale of the mismatch, the median of abs(log pi - log mu)."""
        declared = super().step_statistics()
        return declared if self.threshold_knee is None else {**declared, "mismatch_scale": mismatch_scale}


def mismatch_scale(tokens: BatchTokens) -> float:
    """Return the median of abs(log pi - log mu)."""
    return float(tokens.log_ratio.abs().median())


def adapted_limits(
    limits: tuple[float, float], tokens: Tokens, loss: AdaptiveThresholds
) -> tuple[float | Tensor, float | Tensor]:
    """Return the limits ``(low, high)`` of each token: the same numbers, or less for old and for outlying tokens.

    ``delta / (1 + age / threshold_age)`` is ours. ``delta min(1, max(floor, knee / u))`` with ``u = |log r| / scale``
    is a reading of SAT (arXiv 2607.18722, of which only the abstract was seen): the sampled |log r| stands for the
    staleness, the batch gives the scale, the limit that the sign of A selects is contracted in the tail, and all other
    tokens keep theirs. It never exceeds the nominal limit.

    Args:
        limits: Nominal limits.
        tokens: The prepared inputs.
        loss: Knee, floor and age.
    """
    factor: Tensor | None = None
    if loss.threshold_age is not None:
        assert tokens.ages is not None
        factor = 1 / (1 + tokens.ages / loss.threshold_age)
    if loss.threshold_knee is not None:
        mismatch = tokens.log_ratio.abs() / tokens.statistic("mismatch_scale").clamp(min=_SCALE_FLOOR)
        contraction = (loss.threshold_knee / mismatch).clamp(loss.threshold_floor, 1.0)
        factor = contraction if factor is None else factor * contraction
    # Without either key the limits stay numbers, and every result is the same to the bit.
    return limits if factor is None else (limits[0] * factor, limits[1] * factor)
