"""Advantages of single tokens: returns, and the batch's mean and deviation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_VARIANCE_FLOOR = 1e-8


def returns_to_go(rewards: Tensor) -> Tensor:
    """Return the sum of the rewards from each token on, without discount, ``[T]``.

    Example:
        >>> returns_to_go(torch.tensor([-1.0, 0.0, 2.0]))
        tensor([1., 2., 2.])
    """
    return rewards.flip(0).cumsum(0).flip(0)


@dataclass(frozen=True)
class Moments:
    """Mean and squared deviations of a batch; ranks add them up (Chan, Golub and LeVeque 1983, equation 2.1).

    A difference of two sums, of the squares and of the squared mean, would lose small deviations of large values.
    """

    count: float
    mean: float
    squared_deviations: float

    @classmethod
    def of(cls, values: Tensor) -> Moments:
        """Return the moments of ``[N]`` values, in float64."""
        wide = values.double()
        mean = float(wide.mean()) if len(values) else 0.0
        return cls(len(values), mean, float((wide - mean).square().sum()))

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        if not count:
            return self
        step = other.mean - self.mean
        between = step * step * self.count * other.count / count
        deviations = self.squared_deviations + other.squared_deviations + between
        return Moments(count, self.mean + step * other.count / count, deviations)

    def whiten(self, values: Tensor) -> Tensor:
        """Return ``(values - mean) / deviation``; 0 if there is no spread. The variance is Bessel-corrected, plus 1e-8.

        REINFORCE++ (arXiv 2501.03262, global advantage normalization), as verl's ``masked_whiten``.
        """
        if self.count < 2:
            return torch.zeros_like(values)
        variance = self.squared_deviations / (self.count - 1)
        return ((values.double() - self.mean) / math.sqrt(variance + _VARIANCE_FLOOR)).to(values.dtype)
