"""Decision of a loss for each token, and the forms of decisions and terms that losses share.

True = keep, False = masked. All comparisons are strict: a token exactly on the limit is kept, and so is a token with
advantage 0 (it has no gradient anyway).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.losses.tokens import Tokens


class Decision(NamedTuple):
    """Mask and weight of each token; all ``[T]``, without gradient."""

    keep: Tensor
    """True on tokens that are kept, False on masked ones. Bool; may also be True outside the loss mask."""
    weight: Tensor
    """Factor of the advantage, before ratio_cap and ratio_floor."""
    clipped_weight: Tensor
    """Weight in the reported loss of a masked token: 0, or the clipped ratio of a surrogate. It has no gradient."""
    divergence: Tensor
    """Distance of pi from mu, for the metrics."""


def weigh_by_ratio(tokens: Tokens, divergence: Tensor, keep: Tensor | None = None) -> Decision:
    """Return the decision with weight pi / mu for kept tokens and 0 for masked ones. ``keep`` None keeps all."""
    weight = tokens.log_ratio.exp()
    keep = torch.ones_like(tokens.mask) if keep is None else keep
    return Decision(keep, weight, torch.zeros_like(weight), divergence)


def ratio_keep_mask(
    log_ratio: Tensor, advantages: Tensor, clip_low: float | Tensor, clip_high: float | Tensor
) -> Tensor:
    """Return the mask that gives PPO's clipped gradient, without dual clip.

    Source: arXiv 1707.06347; clip-higher arXiv 2503.14476.

    Args:
        log_ratio: Log pi(a_t) - log mu(a_t). Shape [num_tokens].
        advantages: Shape [num_tokens].
        clip_low: Tokens with a negative advantage and r < 1 - clip_low are masked.
        clip_high: Tokens with a positive advantage and r > 1 + clip_high are masked.

    Returns:
        Bool, shape [num_tokens].
    """
    ratio = log_ratio.exp()
    masked_going_up = (advantages > 0) & (ratio > 1 + clip_high)
    masked_going_down = (advantages < 0) & (ratio < 1 - clip_low)
    return ~(masked_going_up | masked_going_down)


def clipped_surrogate(
    tokens: Tokens,
    log_ratio: Tensor,
    divergence: Tensor,
    clip_ratios: tuple[float | Tensor, float | Tensor],
    dual_clip: float | None = None,
) -> Decision:
    """Return PPO's ``max(-A r, -A clip(r))``, at most ``-A c`` for A < 0 with dual clip (arXiv 1707.06347, 1912.09729).

    Args:
        tokens: The prepared inputs.
        log_ratio: ``[T]`` log r.
        divergence: ``[T]`` for the metrics.
        clip_ratios: Largest distance of r below 1 and above 1.
        dual_clip: Constant c. None disables dual clip.
    """
    # -A r is the larger of the two unless r has left [1 - low, 1 + high] in the direction of the advantage. There the
    # value is the constant -A clip(r), so the gradient is that of -A r on the kept tokens and 0 elsewhere.
    low, high = clip_ratios
    ratio = log_ratio.exp()
    keep = ratio_keep_mask(log_ratio, tokens.advantages, low, high)
    clipped = ratio.clamp(min=1 - low).clamp(max=1 + high)
    if dual_clip is not None:
        # For A < 0 the value -A r grows with r without limit. Dual clip replaces it by the constant -A c.
        beyond = (tokens.advantages < 0) & (ratio > dual_clip)
        keep = keep & ~beyond
        clipped = torch.where(beyond, dual_clip, clipped)
    return Decision(keep, ratio, clipped, divergence)


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
