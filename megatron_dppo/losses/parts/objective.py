"""A loss, with the properties that a trainer relies on."""

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
    """A loss and its properties that a trainer relies on."""

    loss: Callable[[LossInputs], LossOutput]
    """The function that is minimized."""
    by_token: bool
    """True if each token's term depends on that token alone, so that a row can be split into chunks."""
    skips_zero_advantage: bool
    """True if a token with advantage 0 has no gradient, so that its row can be skipped."""
    needs: LossNeeds = NO_NEEDS
    """Statistics that a head must provide."""


def policy_objective(config: LossConfig, *, counterfactuals: bool = False) -> Objective:
    """Return ``policy_loss`` with this configuration, optionally with the metrics of ``losses.counterfactuals``."""
    # Only a loss over whole sequences reads sequence ids.
    by_token = "sequence_ids" not in config.required_inputs
    acts_without_advantage = config.kl_coef > 0 or config.entropy_coef > 0 or config.needs.zero_advantage
    return Objective(
        loss=partial(policy_loss, config=config, counterfactuals=counterfactuals),
        by_token=by_token,
        # A loss over sequences needs all their tokens, also those without a gradient of their own.
        skips_zero_advantage=by_token and not acts_without_advantage,
        needs=LossNeeds(
            entropy_gradient=config.entropy_coef > 0 or config.needs.entropy_gradient,
            other_square="topk_other_square" in config.required_inputs,
            slot_gradient=config.needs.topk_gradient or config.centering,
            topk_sums=_sums(config),
        ),
    )


def _sums(config: LossConfig) -> SlotSums | None:
    if not config.is_topk or config.reads_topk_slots:
        return None
    return predictive_sums if config.topk_summary == "rate" else topk_sums


SUPERVISED = Objective(supervised_loss, by_token=True, skips_zero_advantage=False)
"""Negative log-likelihood, whatever the advantages."""
