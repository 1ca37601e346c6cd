"""Advantages of single tokens: a KL penalty in the reward, returns, and the batch's mean and deviation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]
_MAX_LOG_KL_RATIO = 20.0
"""Limit of the log ratio, as in verl and Stable-RL: an estimate from one token can explode."""
_VARIANCE_FLOOR = 1e-8


def kl_estimate(logprobs: Tensor, target_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """Return estimates of KL(p || target) from single tokens that p sampled (joschu.net/blog/kl-approx.html).

    Example:
        log p - log target = ln 2: k1 = .693, k2 = .240, k3 = 1/2 - 1 + ln 2 = .193.

    Args:
        logprobs: ``[T]`` log p of the token; a gradient passes through.
        target_logprobs: ``[T]``.
        estimator: K1 is unbiased and may be negative, k3 is unbiased and never is, k2 is half the square.
    """
    log_ratio = (logprobs - target_logprobs).clamp(-_MAX_LOG_KL_RATIO, _MAX_LOG_KL_RATIO)
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    # k3 = target / p - 1 + log(p / target)
    return torch.expm1(-log_ratio) + log_ratio


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
