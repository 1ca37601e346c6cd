"""A loss, and what a trainer may take for granted about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.losses.parts.policy_loss import policy_loss, supervised_loss
from megatron_dppo.losses.parts.predictive import predictive_sums
from megatron_dppo.losses.parts.topk import topk_sums
from megatron_dppo.types import NO_NEEDS, LossInputs, LossNeeds, LossOutput, SlotSums


@dataclass(frozen=True)
class Objective:
    """What is minimised."""

    loss: Callable[[LossInputs], LossOutput]
    by_token: bool
    """each token's term depends on that token alone: any part of a row has a loss of its own"""
    skips_zero_advantage: bool
    """a token whose advantage is zero has no gradient"""
    needs: LossNeeds = NO_NEEDS
    """what a head has to give it"""


def policy_objective(config: LossConfig, *, counterfactuals: bool = False) -> Objective:
    """``policy_loss`` of this configuration, if asked with the metrics of ``losses.counterfactuals``."""
    by_token = "sequence_ids" not in config.required_inputs
    acts_without_advantage = config.kl_coef > 0 or config.entropy_coef > 0 or config.needs.zero_advantage
    return Objective(
        loss=partial(policy_loss, config=config, counterfactuals=counterfactuals),
        by_token=by_token,
        skips_zero_advantage=by_token and not acts_without_advantage,
        needs=LossNeeds(
            entropy_gradient=config.entropy_coef > 0 or config.needs.entropy_gradient,
            other_square="topk_other_square" in config.required_inputs,
            slot_gradient=config.needs.topk_gradient,
            topk_sums=_sums(config),
        ),
    )


def _sums(config: LossConfig) -> SlotSums | None:
    if not config.is_topk or config.reads_topk_slots:
        return None
    return predictive_sums if config.topk_summary == "rate" else topk_sums


SUPERVISED = Objective(supervised_loss, by_token=True, skips_zero_advantage=False)
"""Negative log-likelihood, whatever the advantages."""
