"""Trust regions over whole sequences: TRM (arXiv 2512.23075) and the prefix budgets of CPPO (arXiv 2606.10968).

Tokens outside the mask count for nothing: neither as positions nor in a sum. Each sequence must be here as a whole, its
tokens in order and next to each other, as a packed row has them.
"""

import torch
from torch import Tensor

from megatron_dppo.losses.reduce import per_sequence

_QUANTILE = 0.9


def sequence_keep_mask(
    peak: Tensor,
    average: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    largest: float,
    mean: float,
) -> Tensor:
    """Return the mask of TRM: True for all tokens of a sequence whose largest and mean divergence are within limits.

    Args:
        peak: ``[T]`` the divergence whose largest value counts.
        average: ``[T]`` the divergence whose mean counts.
        mask: ``[T]`` bool, the tokens that count.
        sequence_ids: ``[T]`` int64.
        largest: Limit of the largest; infinity = none.
        mean: Limit of the mean; infinity = none.

    Returns:
        ``[T]`` bool. On a limit is inside; NaN is above every finite limit.
    """
    sequences = int(sequence_ids.max()) + 1 if sequence_ids.numel() else 0
    # No divergence is below 0, so the zeros of other tokens, and of the initial tensor, never are the largest value.
    known = torch.where(mask, peak, 0.0).nan_to_num(nan=torch.inf)
    peaks = known.new_zeros(sequences).scatter_reduce(0, sequence_ids, known, "amax")
    means = per_sequence(average.nan_to_num(nan=torch.inf), mask, sequence_ids, "mean")
    return (peaks[sequence_ids] <= largest) & (means <= mean)


def prefix_keep_mask(
    divergence: Tensor,
    direction: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    *,
    thresholds: tuple[float, float],
    floor: float,
    budget: tuple[float, float],
) -> Tensor:
    """Return the mask of CPPO (equations 8 to 10).

    An outward update is kept if ``w_t D_t <= min(delta, delta + b W - S)``.

    Of a sequence with T tokens, position weights fall from 1 to ``floor`` in equal steps; S and W are the sums of
    ``w D`` and of ``w`` over the tokens before t, kept or not; b is the 90th percentile of its D (between two values by
    a straight line), limited to ``budget`` (equation 22). All of it in float64.

    Args:
        divergence: ``[T]`` D; NaN counts as infinite.
        direction: ``[T]`` log pi - log mu; only its sign counts.
        advantages: ``[T]``.
        mask: ``[T]`` bool, the tokens that count.
        sequence_ids: ``[T]`` int64.
        thresholds: Delta for negative and for positive advantages.
        floor: The last position's weight.
        budget: Least and largest b.

    Returns:
        ``[T]`` bool.

    Raises:
        ValueError: The tokens of a sequence are not next to each other.
    """
    lengths = _lengths(sequence_ids)
    low, high = thresholds
    ones = torch.ones_like(divergence, dtype=torch.float64)
    limit = torch.where(advantages > 0, high * ones, low * ones)
    known = divergence.detach().double().nan_to_num(nan=torch.inf)
    parts = zip(known.split(lengths), mask.split(lengths), limit.split(lengths), strict=True)
    inside = [_within_budget(*part, floor, budget) for part in parts]
    # As in ``divergence_keep_mask``: an update that leads back to mu is kept whatever its budget.
    outward = ((advantages > 0) & (direction > 0)) | ((advantages < 0) & (direction < 0))
    return ~outward | (torch.cat(inside) if inside else torch.ones_like(mask))


def _lengths(sequence_ids: Tensor) -> list[int]:
    # A sequence in two pieces gives two runs of one id.
    runs, lengths = sequence_ids.unique_consecutive(return_counts=True)
    if runs.numel() != int(sequence_ids.unique().numel()):
        raise ValueError(
            "sequence_ids: the tokens of a sequence are not next to each other; prefix budgets need each sequence's "
            "tokens next to each other, in order"
        )
    return [int(length) for length in lengths.tolist()]


def _within_budget(
    divergence: Tensor, mask: Tensor, limit: Tensor, floor: float, budget: tuple[float, float]
) -> Tensor:
    """Return the mask for the positions of one sequence, bool [n]."""
    # Positions count tokens inside the mask only: ``rank`` runs from 0 to ``last``.
    last = (mask.sum() - 1).clamp(min=0)
    rank = mask.cumsum(0) - 1
    weights = torch.where(mask, 1 - (1 - floor) * rank.double() / last.clamp(min=1), 0.0)
    weighted = torch.where(mask, weights * divergence, 0.0)
    # b of the sequence. Tokens outside the mask are infinite here, so they sort behind the ``last + 1`` values that
    # count.
    allowance = percentile_90(torch.where(mask, divergence, torch.inf), last).clamp(*budget)
    # delta + b W_t - S_t, with the sums over the tokens before t.
    before = limit + allowance * _shifted_sum(weights) - _shifted_sum(weighted)
    return weighted <= torch.minimum(limit, before)


def _shifted_sum(values: Tensor) -> Tensor:
    """Return the sum of the values before each value."""
    return torch.cat([values.new_zeros(1), values.cumsum(0)[:-1]])


def percentile_90(values: Tensor, last: Tensor) -> Tensor:
    """Return the 90th percentile of the ``last + 1`` smallest values ``[n]``, a scalar."""
    ordered = values.sort().values
    position = _QUANTILE * last.double()
    lower = position.floor().long()
    upper = torch.minimum(lower + 1, last)
    return torch.lerp(ordered[lower], ordered[upper], position - lower).nan_to_num(nan=torch.inf)  # next to an infinity
