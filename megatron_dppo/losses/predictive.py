"""Direction test of predictive masks: the change of the divergence along a token's own update.

The update of the sampled token k moves the logits along ``A (e_k - pi)``. Along it pi_j changes by

    d pi_j = pi_j (1[j = k] - pi_j - (pi_k - sum of pi^2))

and the divergence on the Top-K set and one bucket for the rest by

    KL(mu || pi):  (pi_k - mu_k) + sum over the set of pi_j (mu_j - pi_j) + Q (mu_rest / pi_rest - 1)
    TV:            1/2 sum over the buckets of sign(pi_j - mu_j) d pi_j,
                   d pi_rest = -Q - (pi_k - sum of pi^2) pi_rest

with Q the sum of pi^2 over the rest. With the exact Q these are the true derivatives of the Top-K divergences of
``losses.divergence``; arXiv 2607.10848 estimates Q (``Tail``). With two buckets, the sampled token and the rest, the
sign is that of pi_k - mu_k for every Q, so that Binary masks have nothing to predict.
"""

from typing import Literal

import torch
from torch import Tensor

from megatron_dppo.losses.divergence import topk_sums, valid_slots

Tail = Literal["proportional", "aggregated", "uniform"]
"""Q: the sum itself; pi_rest^2, as if the rest were one token; pi_rest^2 / (V - number of slots), as if it were flat"""


def predictive_sums(topk_logprobs: Tensor, rollout_topk_logprobs: Tensor, valid: Tensor) -> Tensor:
    """Return ``topk_sums`` and the sums for the derivatives, float64 [T, 6], additive over disjoint slots.

    Columns 2 to 5, with s = sign(pi - mu): the sums of pi (mu - pi), pi^2, s pi and s pi^2. Arguments as in
    ``topk_tv``.
    """
    log_p, log_m = valid_slots(topk_logprobs, rollout_topk_logprobs, valid)
    p, m = log_p.exp(), log_m.exp()
    sign, square = (p - m).sign(), p.square()
    columns = [p * (m - p), square, sign * p, sign * square]
    rate_sums = torch.stack([column.sum(-1) for column in columns], -1)
    return torch.cat([topk_sums(topk_logprobs, rollout_topk_logprobs, valid), rate_sums], -1)


def tail_square(tail: Tail, p_other: Tensor, other_square: Tensor | None, num_other: Tensor | None) -> Tensor:
    """Return Q, ``[T]``. ``num_other [T]``: how many ids that pi may have are outside the set, for ``uniform``."""
    if tail == "proportional":
        assert other_square is not None
        return other_square.detach().to(p_other.dtype)
    if tail == "aggregated":
        return p_other.square()
    assert num_other is not None
    return p_other.square() / num_other.clamp(min=1)


def divergence_rate(
    kind: Literal["tv", "kl"],
    sums: Tensor,
    sampled: tuple[Tensor, Tensor],
    other: tuple[Tensor, Tensor],
    square: Tensor,
) -> Tensor:
    """Return the derivative of the divergence along ``e_k - pi``.

    Its sign times the sign of A is positive if the update leads outward.

    Args:
        kind: Total variation or KL.
        sums: ``[T, 6]`` ``predictive_sums`` of all slots, the sampled token's among them.
        sampled: pi_k and mu_k, ``[T]`` each.
        other: The masses of pi and mu outside the set, ``[T]`` each.
        square: ``[T]`` Q.

    Returns:
        ``[T]`` float64.
    """
    p_k, m_k = sampled
    p_other, m_other = other
    # Columns 0 and 1 are those of ``topk_sums``, which give the divergence itself.
    crossed, squares, signed, signed_squares = sums.double()[..., 2:].unbind(-1)
    if kind == "kl":
        # Q <= pi_rest^2, so nothing is left of the bucket where pi_rest is 0.
        other_rate = torch.where(p_other > 0, square / p_other * (m_other - p_other), 0.0)
        return p_k - m_k + crossed + other_rate
    # pi_k - sum of pi^2 over the whole vocabulary: that of the slots and Q.
    excess = p_k - squares - square
    # Sum over the slots of sign(pi_j - mu_j) d pi_j; the sampled token alone has the extra term pi_k.
    of_slots = (p_k - m_k).sign() * p_k - signed_squares - excess * signed
    return (of_slots - (p_other - m_other).sign() * (square + excess * p_other)) / 2
