"""Trust regions by the ratio, and masks against the mismatch of trainer and engine. True = keep, False = masked.

The divergence mask of DPPO is in ``losses.dppo``. All comparisons are strict: a token exactly on the limit is kept, and
so is a token with advantage 0 (it has no gradient anyway).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from megatron_dppo.losses.parts.reduce import per_sequence

if TYPE_CHECKING:
    from megatron_dppo.config.loss_groups import AdaptiveThresholds
    from megatron_dppo.losses.parts.tokens import Tokens


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


def mismatch_keep_mask(
    log_ratio: Tensor,
    mask: Tensor,
    level: Literal["token", "sequence", "geometric"],
    limits: tuple[float, float],
    sequence_ids: Tensor | None = None,
) -> Tensor:
    """Return the mask against disagreement of trainer and engine (masked importance sampling).

    ``token`` masks the tokens whose ratio is outside the limits (IcePop, arXiv 2510.18855). ``sequence`` masks whole
    sequences by the product of their ratios, ``geometric`` by its geometric mean. A limit itself is inside.

    Args:
        log_ratio: For example log pi'(a_t) - log mu(a_t), both at the rollout's weights. Shape [num_tokens].
        mask: Tokens that count for their sequence, bool. Shape [num_tokens].
        level: Unit that is masked.
        limits: Low and high limit of the ratio; low may be 0.
        sequence_ids: Int64, shape [num_tokens]. Required for the two sequence levels. Each sequence must be complete.

    Returns:
        Bool, shape [num_tokens]. A NaN is masked.

    Raises:
        ValueError: If a sequence level has no ``sequence_ids``.
    """
    # Compared as logarithms: the product of a long sequence's ratios leaves the range of fp32.
    low, high = (math.log(limit) if limit > 0 else -math.inf for limit in limits)
    if level != "token":
        if sequence_ids is None:
            raise ValueError(
                f"The mismatch mask of level {level!r} masks whole sequences, but sequence_ids is None. Fix: pass "
                "sequence_ids."
            )
        log_ratio = per_sequence(log_ratio, mask, sequence_ids, "sum" if level == "sequence" else "mean")
    return (log_ratio >= low) & (log_ratio <= high)
