"""Trust regions by the ratio, and limits that differ by token. True = keep, False = masked.

The divergence mask of DPPO is in ``losses.dppo``. All comparisons are strict: a token exactly on the limit is kept, and
so is a token with advantage 0 (it has no gradient anyway).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from megatron_dppo.config.loss_groups import AdaptiveThresholds
    from megatron_dppo.losses.tokens import Tokens


_SCALE_FLOOR = 1e-6
"""Smallest scale of the mismatch: without any, pi and mu differ by rounding only, and nothing is an outlier."""


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
        assert tokens.mismatch_scale is not None
        mismatch = tokens.log_ratio.abs() / tokens.mismatch_scale.clamp(min=_SCALE_FLOOR)
        contraction = (loss.threshold_knee / mismatch).clamp(loss.threshold_floor, 1.0)
        factor = contraction if factor is None else factor * contraction
    # Without either key the limits stay numbers, and every result is the same to the bit.
    return limits if factor is None else (limits[0] * factor, limits[1] * factor)


def ratio_keep_mask(
    log_ratio: Tensor, advantages: Tensor, clip_low: float | Tensor, clip_high: float | Tensor
) -> Tensor:
    """Return the mask that gives PPO's clipped gradient, without dual clip.

    Source: arXiv 1707.06347; clip-higher arXiv 2503.14476.

    Args:
        log_ratio: Log pi(a_t) - log mu(a_t). Shape [num_tokens].
        advantages: Shape [num_tokens].
        clip_low: Tokens with a negative advantage and r < 1 - clip_low are masked.
        clip_high: Tokens with a positive advantage and r > 1 + clip_high are masked.

    Returns:
        Bool, shape [num_tokens].
    """
    ratio = log_ratio.exp()
    masked_going_up = (advantages > 0) & (ratio > 1 + clip_high)
    masked_going_down = (advantages < 0) & (ratio < 1 - clip_low)
    return ~(masked_going_up | masked_going_down)
