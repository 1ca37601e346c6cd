"""The term of a token with its gradient, as most losses have it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_dppo.config.loss import LossConfig
    from megatron_dppo.losses.parts.decision import Decision
    from megatron_dppo.losses.parts.tokens import Tokens


def with_value(term: Tensor, value: Tensor, acts: Tensor) -> Tensor:
    """Return terms that report ``value`` where they act, with the gradient of ``term``; ``[T]`` all."""
    return term + (value - term).detach().where(acts, 0.0)


def policy_term(tokens: Tokens, decision: Decision, keep: Tensor, config: LossConfig) -> Tensor:
    """Return the value ``-A w M log pi`` (or ``-A w M``) with its gradient, ``[T]``, 0 outside the loss mask.

    Every mask is a `where`, on the inside of a product too: a NaN or an infinity behind a factor of 0 comes back, in
    the value or in the gradient.
    """
    floor, cap = config.ratio_limits
    weight = decision.weight.clamp(floor, cap)
    # Advantage 0 gives exactly 0, also where the weight is infinite.
    acts = tokens.mask & (tokens.advantages != 0)
    # pi(a) = 0: r log pi tends to 0, and so does its gradient.
    contributes = keep & acts & (tokens.logprobs.detach() != -torch.inf)
    logprobs = torch.where(contributes, tokens.logprobs, 0.0)
    if config.resolved_form == "reinforce":
        return torch.where(contributes, -tokens.advantages * weight * logprobs, 0.0)
    # The value w with the gradient of w * log pi: differentiating exp() itself would overflow before the clamp.
    moves = (decision.weight >= floor) & (decision.weight <= cap)
    direction = torch.where(moves, logprobs - logprobs.detach(), 0.0)
    # A masked token of a surrogate has a value, its clipped one, and no gradient: the reported loss is that of PPO.
    value = torch.where(keep, weight * (1 + direction), decision.clipped_weight)
    return torch.where(acts, -tokens.advantages * value, 0.0)
