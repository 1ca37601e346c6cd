"""A loss, and what a trainer may take for granted about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.losses.policy_loss import policy_loss, supervised_loss
from megatron_dppo.losses.topk import topk_sums
from megatron_dppo.types import LossInputs, LossOutput


@dataclass(frozen=True)
class Objective:
    """What is minimised."""

    loss: Callable[[LossInputs], LossOutput]
    by_token: bool
    """each token's term depends on that token alone: any part of a row has a loss of its own"""
    skips_zero_advantage: bool
    """a token whose advantage is zero has no gradient"""
    entropy_gradient: bool = False
    """the gradient goes through the entropy too"""
    topk_sums: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """what is all that it needs of the Top-K slots (``losses.topk_sums``); None = it needs the slots, or has none"""


def policy_objective(config: LossConfig) -> Objective:
    """``policy_loss`` of this configuration."""
    by_token = "sequence_ids" not in config.required_inputs
    return Objective(
        loss=partial(policy_loss, config=config),
        by_token=by_token,
        skips_zero_advantage=by_token and not config.kl_coef and not config.entropy_coef,
        entropy_gradient=config.entropy_coef > 0,
        topk_sums=topk_sums if config.is_topk and not config.topk_eviction else None,
    )


SUPERVISED = Objective(supervised_loss, by_token=True, skips_zero_advantage=False)
"""Negative log-likelihood, whatever the advantages."""
