"""Divergences on the partition "each id of TopK(mu, K) and the sampled id" plus one bucket ``other``, per token.

Lower bounds of the divergence over the whole vocabulary and at least the binary estimate (arXiv 2602.04879, equations
15 and 16 and the appendix on partitions). ``other`` is a bucket like the rest; nothing is renormalised.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megatron_dppo.losses.parts.reduce import statistics_dtype

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
    """Return ``topk_tv`` or ``topk_kl``, computed from ``topk_sums`` of all slots.

    Args:
        kind: Total variation or KL.
        sums: ``[T, 2]``, or more columns, which do not count.
        rollout_topk_logprobs: ``[T, K+1]``
        valid: ``[T, K+1]``
        other_logprob: ``[T]``
    """
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
    slots there is room, and nothing is evicted.

    Args:
        topk_logprobs: ``[T, K+1]`` log pi.
        valid: ``[T, K+1]`` bool; slot K is valid exactly where the sampled token is outside the Top-K.
        other_logprob: ``[T]`` or None, as in ``topk_tv``.
        other_square: ``[T]`` sum of pi^2 over ``other``, or None.

    Returns:
        The new ``valid``, ``other_logprob`` and ``other_square``.
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
    """Return both sides in float64, with -inf in invalid slots.

    Float64, because ``other`` is a difference of near-equal numbers.
    """
    sides = (topk_logprobs, rollout_topk_logprobs)
    log_p, log_m = (torch.where(valid, side.detach().double(), -torch.inf) for side in sides)
    return log_p, log_m
