"""Shims for Megatron's optimizer offloading (``HybridDeviceOptimizer``)."""

from contextlib import nullcontext
from typing import Any

import torch

from megatron_dppo_megatron_cpu.torch_proxy import host_copies


def copy_without_cuda() -> None:
    """Let ``HybridDeviceOptimizer`` copy parameters without CUDA."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    groups = HybridDeviceOptimizer._get_sub_optimizer_param_groups
    HybridDeviceOptimizer._get_sub_optimizer_param_groups = host_copies()(groups)


def copy_shards_only() -> None:
    """Skip the copies that the distributed optimizer replaces right after: it builds the optimizer twice."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    copy = HybridDeviceOptimizer._init_sub_optimizers

    def init_sub_optimizers(self: Any) -> None:
        # The first build has nn.Parameters; the shards of the second one are plain tensors.
        if not any(isinstance(p, torch.nn.Parameter) for group in self.param_groups for p in group["params"]):
            copy(self)

    HybridDeviceOptimizer._init_sub_optimizers = init_sub_optimizers


def accept_fp32_weights() -> None:
    """Let the optimizer offload models of another dtype that have weights in fp32, such as decays.

    The shards of such weights are views with a gradient, which no optimizer of torch accepts. Those that stay on the
    device are not updated: their gradients are in ``decoupled_grad``, which is read for other dtypes only.
    """
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    build = DistributedOptimizer._build_model_and_main_param_groups

    def build_model_and_main_param_groups(ranges: Any, buffers: Any, groups: Any, config: Any) -> Any:
        with torch.no_grad() if config.optimizer_cpu_offload else nullcontext():
            return build(ranges, buffers, groups, config)

    DistributedOptimizer._build_model_and_main_param_groups = staticmethod(build_model_and_main_param_groups)
    set_grads = HybridDeviceOptimizer._set_sub_optimizer_grads

    def set_sub_optimizer_grads(self: Any) -> None:
        set_grads(self)
        for group in self.gpu_optimizer.param_groups if self.gpu_optimizer is not None else ():
            for parameter in group["params"]:
                if parameter not in self.fp32_param_to_orig_param:
                    parameter.grad = parameter.decoupled_grad

    HybridDeviceOptimizer._set_sub_optimizer_grads = set_sub_optimizer_grads
