"""Which tokens may contribute gradient. True = keep, everywhere.

A token is dropped only when its update would move pi further *away* from mu than the trust region allows; a token
whose update leads back is always kept (arXiv 2602.04879, equation 12). All comparisons are strict: a token exactly on
the limit is kept, and so is a token with advantage 0 (it has no gradient anyway).
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from megatron_dppo.losses.parts.reduce import per_sequence


def divergence_keep_mask(
    divergence: Tensor, direction: Tensor, advantages: Tensor, threshold_low: float, threshold_high: float
) -> Tensor:
    """The DPPO mask: dropped iff the divergence is strictly above the threshold on the side of the advantage.

    A divergence that is NaN counts as above: a corrupt number must not switch the trust region off.

    Args:
        divergence: ``[T]`` D_t, for example from ``binary_tv``.
        direction: ``[T]``; only its sign counts, above 0 = an update with a positive advantage leads outward:
            log pi(a_t) - log mu(a_t), the direction that pi has gone so far, or a ``divergence_rate``.
        advantages: ``[T]``; the sign is the direction that the update goes.
        threshold_low: limit for negative advantages (probability going down).
        threshold_high: limit for positive advantages (probability going up).

    Returns:
        ``[T]`` bool.
    """
    too_high = (advantages > 0) & (direction > 0) & ~(divergence <= threshold_high)
    too_low = (advantages < 0) & (direction < 0) & ~(divergence <= threshold_low)
    return ~(too_high | too_low)


def ratio_keep_mask(log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """The mask that gives PPO's clipped gradient without dual clip (arXiv 1707.06347; clip-higher: arXiv 2503.14476).

    Args:
        log_ratio: ``[T]`` log pi(a_t) - log mu(a_t).
        advantages: ``[T]``.
        clip_low: tokens with a negative advantage and r < 1 - clip_low are dropped.
        clip_high: tokens with a positive advantage and r > 1 + clip_high are dropped.

    Returns:
        ``[T]`` bool.
    """
    ratio = log_ratio.exp()
    return ~(((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low)))


def mismatch_keep_mask(
    log_ratio: Tensor,
    mask: Tensor,
    level: Literal["token", "sequence", "geometric"],
    limits: tuple[float, float],
    sequence_ids: Tensor | None = None,
) -> Tensor:
    """Drops what the trainer and the engine disagree on too much: masked importance sampling.

    ``token`` drops the tokens whose ratio is outside the limits (IcePop, arXiv 2510.18855). ``sequence`` drops whole
    sequences by the product of their ratios, ``geometric`` by its geometric mean. A limit itself is inside.

    Args:
        log_ratio: ``[T]``, for example log pi(a_t) at the rollout's weights in the trainer minus that in the engine.
        mask: ``[T]`` bool, the tokens that count for their sequence.
        level: what is dropped.
        limits: (low, high) of the ratio; low may be 0.
        sequence_ids: ``[T]`` int64, needed for the two sequence levels; sequences must be whole.

    Returns:
        ``[T]`` bool; NaN is dropped.

    Raises:
        ValueError: a sequence level without ``sequence_ids``.
    """
    low, high = (math.log(limit) if limit > 0 else -math.inf for limit in limits)
    if level != "token":
        if sequence_ids is None:
            raise ValueError(f"the mismatch mask of level {level!r} drops whole sequences, but sequence_ids is None")
        log_ratio = per_sequence(log_ratio, mask, sequence_ids, "sum" if level == "sequence" else "mean")
    return (log_ratio >= low) & (log_ratio <= high)
