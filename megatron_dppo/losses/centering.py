"""Score centering (arXiv 2609.20807): the policy gradient less what the sampler's choice alone adds to it.

With weights f(r) the sum over samples of ``f(r) grad log pi`` has the expectation ``sum over j of mu_j f(pi_j / mu_j)
grad log pi_j`` under the sampler, 0 only where pi = mu. It is subtracted, exactly on the head H = TopK(mu, K) (without
the sampled token, so that H does not depend on it), and outside of H as if mu were pi times rho = mu_rest / pi_rest:

    residual_i = mu_i f(pi_i / mu_i) - alpha pi_i,    alpha = rho f(1 / rho)
    loss = - A (f(r) log pi_k - sum over H of residual_i log pi_i)        (f and residual without gradient)

The last term of a residual is the gradient of the rest: ``sum over the rest of grad pi_j = - sum over H of grad pi_i``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.losses.tokens import Tokens

_REST_FLOOR = 1e-6
"""Least mass outside the head, for both policies: mu's comes from a subtraction of float32 numbers."""


def centering_weight(ratio: Tensor, config: LossConfig) -> Tensor:
    """f(r), in any shape: 1, min(r, C), or r inside the mismatch limits and 0 outside."""
    if config.centering == "none":
        return torch.ones_like(ratio)
    if config.centering == "truncate":
        return ratio.clamp(max=config.ratio_limits[1])
    low, high = config.mismatch_limits
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


@torch.no_grad()
def residuals(tokens: Tokens, config: LossConfig) -> Tensor:
    """``[T, K]`` of the head's ids, 0 in unused slots; in float64."""
    assert tokens.topk is not None and tokens.topk.logprobs is not None
    topk = tokens.topk
    used = topk.valid[:, :-1]
    columns = (tokens.topk.logprobs[:, :-1], topk.rollout_logprobs[:, :-1])
    p, m = (torch.where(used, column.double(), -torch.inf).exp() for column in columns)
    sampled_outside = torch.where(topk.valid[:, -1], tokens.logprobs.double().exp(), 0.0)
    p_rest = (topk.masses()[0] + sampled_outside).clamp(min=_REST_FLOOR)
    m_rest = (1 - m.sum(-1)).clamp(min=_REST_FLOOR)
    rho = m_rest / p_rest
    alpha = rho * centering_weight(1 / rho, config)
    # An id that mu gives probability 0 adds nothing to mu's expectation, whatever the ratio.
    weighted = torch.where(m > 0, m * centering_weight(p / m, config), 0.0)
    return torch.where(used, weighted - alpha[:, None] * p, 0.0)
