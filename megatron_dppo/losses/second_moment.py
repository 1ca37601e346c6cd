"""The limit of M2PO: the largest (log pi - log mu)^2 with which the mean over a whole batch is small enough."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

_MAX_LOG_RATIO = 80.0
"""As in ``Tokens``: a log ratio of -inf, where pi is 0, must not make the limit infinite."""


def squared_log_ratio(log_ratio: Tensor) -> Tensor:
    """Return the squares of finite log ratios."""
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).square()


def select_squares(log_ratio: Tensor, advantages: Tensor, tokens: Literal["outward", "all"]) -> Tensor:
    """Return the squares that ``loss.second_moment_tokens`` compares with the limit.

    Args:
        log_ratio: Log pi - log mu of loss tokens. Shape [num_tokens].
        advantages: Shape [num_tokens].
        tokens: ``outward`` selects those with A log r > 0.
    """
    squares = squared_log_ratio(log_ratio)
    return squares if tokens == "all" else squares[log_ratio * advantages > 0]


def largest_square(squares: Tensor, limit: float) -> float:
    """Return the number that separates the squares that are kept from those that are masked.

    Example: The means of the one, two and three smallest are 0.01, 0.03 and 0.14. The third is masked:

        >>> round(largest_square(torch.tensor([0.05, 0.01, 0.36]), limit=0.04), 3)
        0.205

    Args:
        squares: Of the whole batch. Shape [num_tokens].
        limit: Limit of the mean of the squares that are kept.

    Returns:
        A number halfway between the two, so that the rounding of a second forward pass changes nothing. Equal squares
        are kept or masked together. Infinity where all are kept.
    """
    ordered = squares.double().sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1)
    count = int((means <= limit).sum())
    if count == len(ordered):
        return float("inf")
    smallest_masked = ordered[count]
    below = ordered[ordered < smallest_masked]
    largest_below = float(below[-1]) if len(below) else 0.0
    return (largest_below + float(smallest_masked)) / 2
