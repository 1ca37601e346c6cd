"""Direct estimates of the divergence between the rollout policy mu and the trained policy pi, per token.

Binary estimates merge all tokens but the sampled one into a single event, so they need two numbers a token. Top-K
estimates have the partition "each id of TopK(mu, K) and the sampled id" plus one bucket ``other``, which is a bucket
like the rest; nothing is renormalised. They are at least the binary ones, and all are lower bounds of the divergence
over the full vocabulary (arXiv 2602.04879, equations 13 to 16 and the appendix on partitions).
"""

import math
from typing import Literal

import torch
from torch import Tensor

from megatron_dppo.losses.reduce import statistics_dtype

KlEstimator = Literal["k1", "k2", "k3"]
_MAX_LOG_KL_RATIO = 20.0
"""Limit of the log ratio, as in verl and Stable-RL: an estimate from one token can explode."""


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
    # As in the Top-K: exp(-inf) times an infinity would be NaN.
    return torch.where(log_m == -torch.inf, 0.0, log_m.exp() * (log_m - log_p))


_OTHER_FLOOR = 1e-12
"""Least mass of ``other`` in the KL, for both policies. mu's comes from a subtraction and is noise below this."""


def topk_tv(
    topk_logprobs: Tensor, rollout_topk_logprobs: Tensor, valid: Tensor, other_logprob: Tensor | None = None
) -> Tensor:
    """Return the total variation, half the sum of ``|mu - pi|`` over the buckets (arXiv 2602.04879, equation 15).

    Args:
        topk_logprobs: ``[T, K+1]`` log pi at the ids of the set, in nats.
        rollout_topk_logprobs: ``[T, K+1]`` log mu at the same ids; -inf is a probability of 0.
        valid: ``[T, K+1]`` bool; whatever stands in an invalid slot is ignored.
        other_logprob: ``[T]`` log of pi's mass outside the valid slots; None = 1 minus the valid slots, not below 0.

    Returns:
        ``[T]``, float32, or float64 if an input is; carries no gradient.
    """
    log_p, log_m = valid_slots(topk_logprobs, rollout_topk_logprobs, valid)
    slots = _absolute_differences(log_p, log_m)
    p_other, m_other = other_masses(log_p, log_m, other_logprob)
    return _tv(slots, p_other, m_other).to(statistics_dtype(topk_logprobs, rollout_topk_logprobs))


def topk_kl(
    topk_logprobs: Tensor, rollout_topk_logprobs: Tensor, valid: Tensor, other_logprob: Tensor | None = None
) -> Tensor:
    """Return KL(mu || pi) over the buckets, mu first, with ``0 log 0 = 0`` (arXiv 2602.04879, equation 16).

    The mass of ``other`` is at least 1e-12 on both sides, as in sail-sg/Stable-RL. Infinite where an id of the set has
    pi = 0 < mu. Arguments and result are those of ``topk_tv``, the result in nats and at least 0.
    """
    log_p, log_m = valid_slots(topk_logprobs, rollout_topk_logprobs, valid)
    slots = _relative_entropies(log_p, log_m)
    p_other, m_other = other_masses(log_p, log_m, other_logprob)
    return _kl(slots, p_other, m_other).to(statistics_dtype(topk_logprobs, rollout_topk_logprobs))


def topk_sums(topk_logprobs: Tensor, rollout_topk_logprobs: Tensor, valid: Tensor) -> Tensor:
    """Return the sums of the slots for twice the total variation and for the KL, float64 [T, 2].

    They are additive over disjoint slots, so each shard of a vocabulary can sum the slots that it owns.
    """
    log_p, log_m = valid_slots(topk_logprobs, rollout_topk_logprobs, valid)
    # Column 0 gets its half and both get the bucket ``other`` in ``divergence_from_sums``.
    return torch.stack([_absolute_differences(log_p, log_m), _relative_entropies(log_p, log_m)], -1)


def divergence_from_sums(
    kind: Literal["tv", "kl"], sums: Tensor, rollout_topk_logprobs: Tensor, valid: Tensor, other_logprob: Tensor
) -> Tensor:
    """Return ``topk_tv`` or ``topk_kl``, computed from ``topk_sums`` of all slots."""
    log_m = torch.where(valid, rollout_topk_logprobs.detach().double(), -torch.inf)
    # pi's slots are not known here. ``other_logprob`` is, so the first argument is not read.
    p_other, m_other = other_masses(log_m, log_m, other_logprob)
    total = _tv(sums[:, 0], p_other, m_other) if kind == "tv" else _kl(sums[:, 1], p_other, m_other)
    return total.to(statistics_dtype(rollout_topk_logprobs))


def _absolute_differences(log_p: Tensor, log_m: Tensor) -> Tensor:
    return (log_m.exp() - log_p.exp()).abs().sum(-1)


def _relative_entropies(log_p: Tensor, log_m: Tensor) -> Tensor:
    # exp(-inf) * (-inf - x) is NaN, and a NaN is never above a threshold: the mask would switch itself off.
    return torch.where(log_m == -torch.inf, 0.0, log_m.exp() * (log_m - log_p)).sum(-1)


def _tv(slots: Tensor, p_other: Tensor, m_other: Tensor) -> Tensor:
    # Half of the sum over all buckets: what one of them loses, others gain.
    return (slots + (m_other - p_other).abs()) / 2


def _kl(slots: Tensor, p_other: Tensor, m_other: Tensor) -> Tensor:
    p_other, m_other = p_other.clamp(min=_OTHER_FLOOR), m_other.clamp(min=_OTHER_FLOOR)
    # With the floor the masses no longer add up to 1, and the sum can fall below 0.
    return (slots + m_other * (m_other.log() - p_other.log())).clamp(min=0)


def other_masses(
    topk_logprobs: Tensor, rollout_topk_logprobs: Tensor, other_logprob: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the mass of ``other`` under pi and mu, at least 0, ``[T]`` each. Unused slots must be -inf."""
    m_other = (1 - rollout_topk_logprobs.exp().sum(-1)).clamp(min=0)
    if other_logprob is None:
        return (1 - topk_logprobs.exp().sum(-1)).clamp(min=0), m_other
    return other_logprob.detach().to(m_other.dtype).exp(), m_other


def evict(
    topk_logprobs: Tensor, valid: Tensor, other_logprob: Tensor | None, other_square: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Limit the set to K ids, as Stable-RL and TRL do: a sampled token outside the Top-K replaces the K-th.

    The evicted id's mass goes back to ``other``, so the divergence never grows. Where the engine filled fewer than K
    slots there is room, and nothing is evicted. Slot K of ``valid [T, K+1]`` is used exactly where the sampled token is
    outside the Top-K. Returns the new ``valid``, ``other_logprob`` and ``other_square``.
    """
    # All K + 1 slots are used only where the Top-K is full and the sampled token is outside it.
    evicted = valid.all(-1)
    remaining = valid.clone()
    # Slot K - 1 holds the id of the lowest rank; slot K, the sampled token, stays.
    remaining[:, -2] &= ~evicted
    returned = torch.where(evicted, topk_logprobs[:, -2].detach(), -torch.inf)
    return (
        remaining,
        None if other_logprob is None else torch.logaddexp(other_logprob.detach(), returned),
        # exp(2 log pi) = pi^2.
        None if other_square is None else other_square.detach() + (2 * returned).exp(),
    )


def valid_slots(topk_logprobs: Tensor, rollout_topk_logprobs: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return both sides in float64, as ``other`` is a difference of near-equal numbers, -inf in invalid slots."""
    sides = (topk_logprobs, rollout_topk_logprobs)
    log_p, log_m = (torch.where(valid, side.detach().double(), -torch.inf) for side in sides)
    return log_p, log_m


def kl_estimate(logprobs: Tensor, target_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """Return estimates of KL(p || target) from single tokens that p sampled (joschu.net/blog/kl-approx.html).

    A gradient passes through ``logprobs``. K1 is unbiased and may be negative, k3 is unbiased and never is, k2 is half
    the square.

    Example:
        log p - log target = ln 2: k1 = .693, k2 = .240, k3 = 1/2 - 1 + ln 2 = .193.
    """
    log_ratio = (logprobs - target_logprobs).clamp(-_MAX_LOG_KL_RATIO, _MAX_LOG_KL_RATIO)
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    # k3 = target / p - 1 + log(p / target)
    return torch.expm1(-log_ratio) + log_ratio
