"""Score centering beside any loss of single tokens: its own gradient less what that has in the mean over the sampler.

    loss of a token = its term + A * sum over H of residual_v log pi_v              (residual without gradient)
    residual_v = mu_v f_A(v) - alpha_A pi_v,    alpha_A = rho f_A(tail),    rho = mu_other / pi_other

The term of a loss has the gradient ``- A f_A(k) grad log pi_k`` with the weight f_A of the sampled id k: the ratio, cut
and masked as the loss does it for the sign of A. Its mean over ids drawn from mu is ``- A sum_v mu_v f_A(v) grad log
pi_v``, which is 0 only where f is 1 and pi = mu. It is subtracted exactly on the head H = TopK(mu, K). Outside of H mu
is taken to be pi times rho, and ``sum over the others of grad pi_v = - sum over H of grad pi_v`` moves that part to the
ids of H. Where H is all that mu can sample (a sampling mask of K ids or fewer) nothing is approximate.

Source: arXiv 2609.20807, equation 14, for the weights 1, min(r, C) and a mask of the ratio. For masks by divergence and
by the sign of A it follows from the definition; a worked case and finite differences check it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from megatron_dppo.losses.mismatch import decide, mismatch_mask
from megatron_dppo.losses.predictive import divergence_rate
from megatron_dppo.losses.tokens import Tokens, TopK

if TYPE_CHECKING:
    from megatron_dppo.losses.decision import Decision
    from megatron_dppo.losses.predictive import Tail
    from megatron_dppo.losses.rule import Loss
    from megatron_dppo.types import LossInputs

_OTHER_FLOOR = 1e-6
"""Smallest mass outside the head, for both policies. The mass of mu is a difference of float32 numbers."""
_TAIL_LOGPROB = -50.0
"""Log mu of the id that stands for the tail. Its probability is far below every threshold, so only its ratio counts."""


def centering_term(inputs: LossInputs, tokens: Tokens, loss: Loss) -> Tensor:
    """Return A times the expected weighted score of the sampler, with the gradient of log pi at the ids of the head.

    It does not depend on the sampled token, and acts where that is masked too: the mean over the sampler includes it.
    ``[T]``, 0 outside the loss mask and where the advantage is 0.
    """
    if inputs.topk_logprobs is None or (tokens.logprobs.requires_grad and not inputs.topk_logprobs.requires_grad):
        raise ValueError(
            "topk_logprobs carries no gradient, so centering would subtract nothing. Fix: pass log pi at the ids of "
            "the head without detaching it."
        )
    acts = tokens.mask & (tokens.advantages != 0)
    if loss.mismatch in ("mask_sequence", "mask_geometric"):
        # These remove whole sequences, whatever single ids would have been.
        acts = acts & mismatch_mask(tokens, loss)
    residual = _residuals(inputs, tokens, loss)
    head = inputs.topk_logprobs[:, :-1].to(tokens.logprobs.dtype)
    contributes = acts[:, None] & (residual != 0) & head.isfinite()
    scores = (residual.to(head.dtype) * head.where(contributes, 0.0)).where(contributes, 0.0)
    return tokens.advantages * scores.sum(-1)


@torch.no_grad()
def _residuals(inputs: LossInputs, tokens: Tokens, loss: Loss) -> Tensor:
    """Return the residuals of the head's ids, float64 [T, K], 0 in unused slots."""
    assert inputs.topk_logprobs is not None and inputs.rollout_topk_logprobs is not None
    assert inputs.topk_valid is not None
    used = inputs.topk_valid[:, :-1] & tokens.mask[:, None]
    log_pi = inputs.topk_logprobs[:, :-1].double().where(used, -math.inf)
    log_mu = inputs.rollout_topk_logprobs[:, :-1].double().where(used, -math.inf)
    head = _head_set(inputs, tokens)
    pi_other, mu_other = (mass.clamp(min=_OTHER_FLOOR) for mass in head.masses())
    # mu = 0 adds nothing to the mean, whatever the weight. In the columns below it stands as an id of ratio 1.
    possible = log_mu > -math.inf
    at_ids = (log_pi.where(possible, 0.0), log_mu.where(possible, 0.0))
    tail_ratio = (pi_other / mu_other).log()[:, None]
    weight = _weights(tokens, loss, head, at_ids, tail_ratio)
    mean = (log_mu.exp() * weight[:, :-1]).where(possible, 0.0)
    alpha = mu_other / pi_other * weight[:, -1]
    return (mean - alpha[:, None] * log_pi.exp()).where(used, 0.0)


def _weights(tokens: Tokens, loss: Loss, head: TopK, at_ids: tuple[Tensor, Tensor], tail_ratio: Tensor) -> Tensor:
    """Return f_A of each id of the head and, last, of the tail, float64 [T, K + 1]."""
    log_pi, log_mu = at_ids
    tail = torch.full_like(tail_ratio, _TAIL_LOGPROB)
    columns = log_pi.shape[1] + 1
    each = Tokens(
        mask=tokens.mask[:, None].expand(-1, columns),
        logprobs=torch.cat([log_pi, tail + tail_ratio], 1),
        rollout_logprobs=torch.cat([log_mu, tail], 1),
        advantages=tokens.advantages.double()[:, None].expand(-1, columns),
        # From the masses: the sum with a large constant would have lost digits.
        log_ratio=torch.cat([tokens.limited(log_pi - log_mu), tail_ratio], 1),
        recomputed_logprobs=None,
        sequence_ids=None,
        topk=head if loss.needs.topk else None,
        ages=None if tokens.ages is None else tokens.ages[:, None],
        columns={name: column[:, None] for name, column in tokens.columns.items()},
        statistics=tokens.statistics,
    )
    sequence_mask = loss.mismatch in ("mask_sequence", "mask_geometric")
    return _gradient_weight(loss.decide(each) if sequence_mask else decide(each, loss), loss)


def _gradient_weight(decision: Decision, loss: Loss) -> Tensor:
    """Return the factor of ``- A grad log pi``, as ``policy_term`` differentiates it."""
    floor, cap = loss.ratio_limits
    weight = decision.weight.clamp(floor, cap)
    keep = decision.keep
    if loss.resolved_form == "ratio":  # a weight at its limit is a number, without gradient
        keep = keep & (decision.weight >= floor) & (decision.weight <= cap)
    return weight.where(keep, 0.0)


def _head_set(inputs: LossInputs, tokens: Tokens) -> PerIdTopK:
    """Return the Top-K set without the slot of the sampled token, whose mass belongs to the other ids."""
    assert inputs.topk_logprobs is not None and inputs.rollout_topk_logprobs is not None
    assert inputs.topk_valid is not None
    valid = inputs.topk_valid & tokens.mask[:, None]
    sampled = tokens.logprobs.detach().double().where(valid[:, -1], -math.inf)
    valid = torch.cat([valid[:, :-1], torch.zeros_like(valid[:, -1:])], 1)
    other, square = inputs.topk_other_logprob, inputs.topk_other_square
    return PerIdTopK(
        logprobs=inputs.topk_logprobs.detach(),
        sums=None,
        rollout_logprobs=inputs.rollout_topk_logprobs.detach(),
        valid=valid,
        other_logprob=None if other is None else torch.logaddexp(other.detach().double(), sampled),
        other_square=None if square is None else square.detach().double() + (2 * sampled).exp(),
        support=None if tokens.topk is None else tokens.topk.support,
    )


@dataclass(frozen=True)
class PerIdTopK(TopK):
    """A Top-K set whose results are columns ``[T, 1]``, or ``[T, n]`` for n ids of each position."""

    def divergence(self, kind: Literal["tv", "kl"]) -> Tensor:
        """Return the divergence on the set, ``[T, 1]``: one number for all ids of a position."""
        return super().divergence(kind)[:, None]

    def rate(self, kind: Literal["tv", "kl"], tail: Tail, logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
        """Return the ``divergence_rate`` of each id, ``[T, n]``."""
        sums, (p_other, m_other), square = self.rate_parts(tail)
        sampled = (logprobs.double().exp(), rollout_logprobs.double().exp())
        return divergence_rate(kind, sums[:, None], sampled, (p_other[:, None], m_other[:, None]), square[:, None])
