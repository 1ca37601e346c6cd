"""Decision of a loss for each token with the mask against the mismatch of trainer and engine."""

import math
from typing import Literal, cast

import torch
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.losses.decision import Decision
from megatron_dppo.losses.reduce import per_sequence
from megatron_dppo.losses.rule import Loss
from megatron_dppo.losses.tokens import Tokens


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


def mismatch_keep_mask(
    log_ratio: Tensor,
    mask: Tensor,
    level: Literal["token", "sequence", "geometric"],
    limits: tuple[float, float],
    sequence_ids: Tensor | None = None,
) -> Tensor:
    """Return the mask against disagreement of trainer and engine (masked importance sampling).

    ``token`` masks the tokens whose ratio is outside the limits (IcePop, arXiv 2510.18855). ``sequence`` masks whole
    sequences by the product of their ratios, ``geometric`` by its geometric mean. A limit itself is inside.

    Args:
        log_ratio: For example log pi'(a_t) - log mu(a_t), both at the rollout's weights. Shape [num_tokens].
        mask: Tokens that count for their sequence, bool. Shape [num_tokens].
        level: Unit that is masked.
        limits: Low and high limit of the ratio; low may be 0.
        sequence_ids: Int64, shape [num_tokens]. Required for the two sequence levels. Each sequence must be complete.

    Returns:
        Bool, shape [num_tokens]. A NaN is masked.

    Raises:
        ValueError: If a sequence level has no ``sequence_ids``.
    """
    # Compared as logarithms: the product of a long sequence's ratios leaves the range of fp32.
    low, high = (math.log(limit) if limit > 0 else -math.inf for limit in limits)
    if level != "token":
        if sequence_ids is None:
            raise ValueError(
                f"The mismatch mask of level {level!r} masks whole sequences, but sequence_ids is None. Fix: pass "
                "sequence_ids."
            )
        log_ratio = per_sequence(log_ratio, mask, sequence_ids, "sum" if level == "sequence" else "mean")
    return (log_ratio >= low) & (log_ratio <= high)
