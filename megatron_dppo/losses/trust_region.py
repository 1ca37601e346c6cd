"""Which tokens may contribute gradient. True = keep, everywhere.

A token is dropped only when its update would move pi further *away* from mu than the trust region allows; a token
whose update leads back is always kept (arXiv 2602.04879, equation 12). All comparisons are strict: a token exactly on
the limit is kept, and so is a token with advantage 0 (it has no gradient anyway).
"""

from __future__ import annotations

from torch import Tensor


def divergence_keep_mask(
    divergence: Tensor, log_ratio: Tensor, advantages: Tensor, threshold_low: float, threshold_high: float
) -> Tensor:
    """The DPPO mask: dropped iff the divergence is strictly above the threshold on the side of the advantage.

    Args:
        divergence: ``[T]`` D_t, for example from ``binary_tv``.
        log_ratio: ``[T]`` log pi(a_t) - log mu(a_t); its sign is the direction that pi has gone so far.
        advantages: ``[T]``; the sign is the direction that the update goes.
        threshold_low: limit for negative advantages (probability going down).
        threshold_high: limit for positive advantages (probability going up).

    Returns:
        ``[T]`` bool.
    """
    too_high = (advantages > 0) & (log_ratio > 0) & (divergence > threshold_high)
    too_low = (advantages < 0) & (log_ratio < 0) & (divergence > threshold_low)
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
