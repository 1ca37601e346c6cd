"""Policy losses: tensors in, sums out. Pure torch; no collectives, no input or output, no Megatron."""

from megatron_dppo.losses.advantages import group_relative_advantages
from megatron_dppo.losses.divergence import binary_kl, binary_tv
from megatron_dppo.losses.policy_loss import dppo_loss, policy_loss, supervised_loss
from megatron_dppo.losses.trust_region import divergence_keep_mask, ratio_keep_mask

__all__ = [
    "binary_kl",
    "binary_tv",
    "divergence_keep_mask",
    "dppo_loss",
    "group_relative_advantages",
    "policy_loss",
    "ratio_keep_mask",
    "supervised_loss",
]
