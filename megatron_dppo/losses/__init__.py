"""Policy losses: tensors in, sums out. Pure torch, without collectives, files or Megatron.

Each file of this folder is one loss, or several that differ in one place. Start with ``dppo``, which also defines the
terms. ``user_loss`` runs a user-defined function.

``parts`` holds the functions that losses share; they are re-exported here. Importing this package does not import
torch: a name loads its module on first use, so that the configuration of a loss can be read without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_dppo.config.user_functions import needs
    from megatron_dppo.losses.dppo import divergence_keep_mask, dppo_loss
    from megatron_dppo.losses.parts.advantages import advantages_by
    from megatron_dppo.losses.parts.counterfactuals import with_cosines
    from megatron_dppo.losses.parts.decision import Decision, clipped_surrogate, mismatch_log_ratio, weigh_by_ratio
    from megatron_dppo.losses.parts.divergence import binary_kl, binary_tv
    from megatron_dppo.losses.parts.example import show
    from megatron_dppo.losses.parts.loss import Loss
    from megatron_dppo.losses.parts.objective import SUPERVISED, Objective, policy_objective
    from megatron_dppo.losses.parts.policy_loss import no_policy_loss, policy_loss, supervised_loss
    from megatron_dppo.losses.parts.predictive import divergence_rate, predictive_sums
    from megatron_dppo.losses.parts.reduce import BatchTotals, per_sequence, sequence_weight, token_weights
    from megatron_dppo.losses.parts.second_moment import largest_square, select_squares, squared_log_ratio
    from megatron_dppo.losses.parts.sequences import prefix_keep_mask, sequence_keep_mask
    from megatron_dppo.losses.parts.terms import policy_term, with_value
    from megatron_dppo.losses.parts.tokens import Tokens
    from megatron_dppo.losses.parts.topk import topk_kl, topk_sums, topk_tv
    from megatron_dppo.losses.parts.trust_region import adapted_limits, mismatch_keep_mask, ratio_keep_mask
    from megatron_dppo.losses.parts.user_functions import call_user_loss

_MODULES = {
    "BatchTotals": "losses.parts.reduce",
    "Decision": "losses.parts.decision",
    "Loss": "losses.parts.loss",
    "Objective": "losses.parts.objective",
    "SUPERVISED": "losses.parts.objective",
    "Tokens": "losses.parts.tokens",
    "adapted_limits": "losses.parts.trust_region",
    "advantages_by": "losses.parts.advantages",
    "binary_kl": "losses.parts.divergence",
    "binary_tv": "losses.parts.divergence",
    "call_user_loss": "losses.parts.user_functions",
    "clipped_surrogate": "losses.parts.decision",
    "divergence_keep_mask": "losses.dppo",
    "divergence_rate": "losses.parts.predictive",
    "dppo_loss": "losses.dppo",
    "group_relative_advantages": "losses.parts.group_relative",
    "largest_square": "losses.parts.second_moment",
    "mismatch_keep_mask": "losses.parts.trust_region",
    "mismatch_log_ratio": "losses.parts.decision",
    "needs": "config.user_functions",
    "no_policy_loss": "losses.parts.policy_loss",
    "per_sequence": "losses.parts.reduce",
    "policy_loss": "losses.parts.policy_loss",
    "policy_objective": "losses.parts.objective",
    "policy_term": "losses.parts.terms",
    "predictive_sums": "losses.parts.predictive",
    "prefix_keep_mask": "losses.parts.sequences",
    "ratio_keep_mask": "losses.parts.trust_region",
    "select_squares": "losses.parts.second_moment",
    "sequence_keep_mask": "losses.parts.sequences",
    "sequence_weight": "losses.parts.reduce",
    "show": "losses.parts.example",
    "squared_log_ratio": "losses.parts.second_moment",
    "supervised_loss": "losses.parts.policy_loss",
    "token_weights": "losses.parts.reduce",
    "topk_kl": "losses.parts.topk",
    "topk_sums": "losses.parts.topk",
    "topk_tv": "losses.parts.topk",
    "weigh_by_ratio": "losses.parts.decision",
    "with_cosines": "losses.parts.counterfactuals",
    "with_value": "losses.parts.terms",
}
__all__ = [
    "SUPERVISED",
    "BatchTotals",
    "Decision",
    "Loss",
    "Objective",
    "Tokens",
    "adapted_limits",
    "advantages_by",
    "binary_kl",
    "binary_tv",
    "call_user_loss",
    "clipped_surrogate",
    "divergence_keep_mask",
    "divergence_rate",
    "dppo_loss",
    "group_relative_advantages",
    "largest_square",
    "mismatch_keep_mask",
    "mismatch_log_ratio",
    "needs",
    "no_policy_loss",
    "per_sequence",
    "policy_loss",
    "policy_objective",
    "policy_term",
    "predictive_sums",
    "prefix_keep_mask",
    "ratio_keep_mask",
    "select_squares",
    "sequence_keep_mask",
    "sequence_weight",
    "show",
    "squared_log_ratio",
    "supervised_loss",
    "token_weights",
    "topk_kl",
    "topk_sums",
    "topk_tv",
    "weigh_by_ratio",
    "with_cosines",
    "with_value",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}. It has: {', '.join(__all__)}")
    return getattr(import_module(f"megatron_dppo.{_MODULES[name]}"), name)
