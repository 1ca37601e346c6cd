"""Trust regions by the ratio, and masks against the mismatch of trainer and engine. True = keep, False = masked.

The divergence mask of DPPO is in ``losses.dppo``. All comparisons are strict: a token exactly on the limit is kept, and
so is a token with advantage 0 (it has no gradient anyway).
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from megatron_dppo.losses.parts.reduce import per_sequence


def ratio_keep_mask(log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
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
