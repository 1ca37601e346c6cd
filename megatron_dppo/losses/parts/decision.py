"""Decision of a loss for each token, and the forms that several losses share. True = keep, False = masked."""

from __future__ import annotations

from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.losses.parts.loss import Loss
from megatron_dppo.losses.parts.tokens import Tokens
from megatron_dppo.losses.parts.trust_region import mismatch_keep_mask, ratio_keep_mask


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


def decide(tokens: Tokens, loss: Loss) -> Decision:
    """Return mask and weight of every token under ``loss``, the mismatch mask included."""
    decision = loss.decide(tokens)
    # ``truncate`` masks nothing: ``ppo_decoupled`` limits its weight pi' / mu with it.
    if loss.mismatch in ("none", "truncate"):
        return decision
    return mask_outside(decision, mismatch_mask(tokens, loss))


def mismatch_mask(tokens: Tokens, loss: Loss) -> Tensor:
    """Return the mask of a ``mask_*`` mode of ``loss.mismatch``, in the shape of the tokens."""
    return mismatch_keep_mask(
        mismatch_log_ratio(tokens, loss),
        tokens.mask,
        cast(Literal["token", "sequence", "geometric"], loss.mismatch.removeprefix("mask_")),
        loss.mismatch_limits,
        tokens.sequence_ids,
    )


def mask_outside(decision: Decision, inside: Tensor) -> Decision:
    """Mask the tokens that are not ``inside`` (``[T]`` bool); they report 0."""
    clipped = torch.where(inside, decision.clipped_weight, 0.0)
    return decision._replace(keep=decision.keep & inside, clipped_weight=clipped)


def mismatch_log_ratio(tokens: Tokens, config: LossConfig) -> Tensor:
    """Return log pi' - log mu (both at the rollout's weights) if the loss reads pi', else log pi - log mu."""
    return tokens.recomputed - tokens.rollout_logprobs if config.mismatch_uses_recomputed else tokens.log_ratio


def weigh_by_ratio(tokens: Tokens, divergence: Tensor, keep: Tensor | None = None) -> Decision:
    """Return the decision with weight pi / mu for kept tokens and 0 for masked ones. ``keep`` None keeps all."""
    weight = tokens.log_ratio.exp()
    keep = torch.ones_like(tokens.mask) if keep is None else keep
    return Decision(keep, weight, torch.zeros_like(weight), divergence)


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
