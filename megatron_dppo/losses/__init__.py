"""Policy losses: tensors in, sums out. Pure torch; no collectives, no input or output, no Megatron."""

from megatron_dppo.config.user_functions import needs
from megatron_dppo.losses.advantages import advantages_by, group_relative_advantages
from megatron_dppo.losses.counterfactuals import with_cosines
from megatron_dppo.losses.divergence import binary_kl, binary_tv
from megatron_dppo.losses.objective import SUPERVISED, Objective, policy_objective
from megatron_dppo.losses.policy_loss import dppo_loss, no_policy_loss, policy_loss, supervised_loss
from megatron_dppo.losses.predictive import divergence_rate, predictive_sums
from megatron_dppo.losses.reduce import BatchTotals, sequence_weight, token_weights
from megatron_dppo.losses.topk import topk_kl, topk_sums, topk_tv
from megatron_dppo.losses.trust_region import divergence_keep_mask, mismatch_keep_mask, ratio_keep_mask

__all__ = [
    "SUPERVISED",
    "BatchTotals",
    "Objective",
    "advantages_by",
    "binary_kl",
    "binary_tv",
    "divergence_keep_mask",
    "divergence_rate",
    "dppo_loss",
    "group_relative_advantages",
    "mismatch_keep_mask",
    "needs",
    "no_policy_loss",
    "policy_loss",
    "policy_objective",
    "predictive_sums",
    "ratio_keep_mask",
    "sequence_weight",
    "supervised_loss",
    "token_weights",
    "topk_kl",
    "topk_sums",
    "topk_tv",
    "with_cosines",
]
