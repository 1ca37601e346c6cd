"""Direct estimates of the divergence between the rollout policy mu and the trained policy pi, per token.

Binary estimates merge all tokens but the sampled one into a single event, so they need two numbers a token.
Both are lower bounds of the divergence over the full vocabulary (arXiv 2602.04879, appendix on partitions).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_dppo.losses.parts.reduce import statistics_dtype


def binary_tv(logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """Return the total variation of the two-event distributions, ``|pi(a) - mu(a)|`` (arXiv 2602.04879, equation 13).

    Args:
        logprobs: ``[T]`` log pi(a_t|s_t), in nats.
        rollout_logprobs: ``[T]`` log mu(a_t|s_t), in nats.

    Returns:
        ``[T]`` in [0, 1], float32, or float64 if an input is; carries no gradient.
    """
    dtype = statistics_dtype(logprobs, rollout_logprobs)
    return (logprobs.detach().to(dtype).exp() - rollout_logprobs.detach().to(dtype).exp()).abs()


def binary_kl(logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """Return KL(mu || pi) of the two-event distributions, mu first (arXiv 2602.04879, equation 14).

    ``m log(m / p) + (1 - m) log((1 - m) / (1 - p))`` with ``0 log 0 = 0``; infinite where pi(a) = 0 < mu(a).

    A log pi that was rounded to 0 says that 1 - pi(a) is below the resolution of the dtype, not that it is zero, so it
    is read as half a unit of resolution: a confident token has a large divergence, never an infinite one.

    Args:
        logprobs: ``[T]`` log pi(a_t|s_t), in nats.
        rollout_logprobs: ``[T]`` log mu(a_t|s_t), in nats.

    Returns:
        ``[T]``, at least 0, in nats, float32, or float64 if an input is; carries no gradient.
    """
    dtype = statistics_dtype(logprobs, rollout_logprobs)
    log_p = logprobs.detach().to(dtype).clamp(max=-torch.finfo(dtype).eps / 2)
    # Rounding may leave log mu just above 0, and then log(1 - mu) would be NaN.
    log_m = rollout_logprobs.detach().to(dtype).clamp(max=0)
    return (_kl_term(log_m, log_p) + _kl_term(_log_complement(log_m), _log_complement(log_p))).clamp(min=0)


def _log_complement(log_x: Tensor) -> Tensor:
    """Return ``log(1 - x)`` from ``log x``, without cancellation at either end."""
    # Near x = 1 expm1 keeps the digits of 1 - x, near x = 0 log1p does (Mächler's log1mexp).
    return torch.where(log_x > -math.log(2), (-torch.expm1(log_x)).log(), torch.log1p(-log_x.exp()))


def _kl_term(log_m: Tensor, log_p: Tensor) -> Tensor:
    """Return ``m (log m - log p)``, zero if m = 0 (also if p = 0 there)."""
    # As in ``topk``: exp(-inf) times an infinity would be NaN.
    return torch.where(log_m == -torch.inf, 0.0, log_m.exp() * (log_m - log_p))
