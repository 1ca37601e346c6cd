"""Megatron's optimizer offload without CUDA, and with a copy of the rank's shard alone."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from megatron_dppo.mcore.compat.torch_proxy import host_copies


def copy_without_cuda() -> None:
    """A shim: let ``HybridDeviceOptimizer`` make its copies where there is no CUDA."""
    groups = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def get_sub_optimizer_param_groups(self: Any, offload_fraction: float) -> Any:
        with host_copies():
            return groups(self, offload_fraction)

    HybridDeviceOptimizer._get_sub_optimizer_param_groups = get_sub_optimizer_param_groups


def copy_shards_only() -> None:
    """A shim: leave the copies out that the distributed optimizer is about to replace."""
    copy = HybridDeviceOptimizer._init_sub_optimizers

    def init_sub_optimizers(self: Any) -> None:
        # Whole weights come first; the shards that are trained afterwards are plain tensors.
        if not any(isinstance(p, torch.nn.Parameter) for group in self.param_groups for p in group["params"]):
            copy(self)

    HybridDeviceOptimizer._init_sub_optimizers = init_sub_optimizers
