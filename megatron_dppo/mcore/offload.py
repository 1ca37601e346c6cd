"""Fixes for Megatron's optimizer offloading (``HybridDeviceOptimizer``): initial state and checkpoints.

Reason: it creates its moments by an update with random gradients. Its checkpoint holds classes, and loading one copies
the bf16 weights to the host again. It resets the loaded number of updates before each update of the GPU's part, so that
Adam's bias correction never advances. Here moments start as zeros, and a checkpoint is that of the optimizer without
offloading: each continues the other.
Affected: Megatron Core 0.16.1 to 0.19.2.
Delete when: a resumed HybridDeviceOptimizer continues bitwise.
"""

import sys
from collections.abc import Iterator, Sequence, Set
from functools import partial
from types import ModuleType
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

_ADAM_KEYS = frozenset({"lr", "weight_decay", "betas", "eps", "bias_correction"})


def is_offloaded(optimizer: MegatronOptimizer) -> bool:
    """Return True if a part of Megatron's optimizer keeps state on the host."""
    return isinstance(optimizer.optimizer, HybridDeviceOptimizer)


def start_offloaded(optimizer: DistributedOptimizer) -> None:
    """Create the moments, and let ``optimizer`` load checkpoints as without offloading."""
    _start(optimizer.optimizer)
    optimizer.load_state_dict = partial(_load_state_dict, optimizer)


def offloaded_tensors(optimizer: DistributedOptimizer) -> Iterator[Tensor]:
    """Yield the fp32 main parameters and moments, on host and GPU."""
    for state in optimizer.optimizer.state.values():
        yield from (tensor for name, tensor in state.items() if name != "step")


def drop_gradient_copies(optimizer: DistributedOptimizer) -> None:
    """Free the fp32 copies of bf16 gradients that an update leaves on the GPU."""
    part = optimizer.optimizer.gpu_optimizer
    for group in part.param_groups if part is not None else ():
        for parameter in group["params"]:
            parameter.grad = None


def _start(hybrid: HybridDeviceOptimizer) -> None:
    for part in hybrid.sub_optimizers:
        for group in part.param_groups:
            for parameter in group["params"]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                # torch's Adam on the host counts updates per parameter, the GPU's part in its parameter groups.
                step = {} if part is hybrid.gpu_optimizer else {"step": torch.zeros((), dtype=torch.float32)}
                part.state[parameter] = step | moments
    hybrid._sync_sub_optimizers_state_to_hdo()


HOST_ALLOCATIONS: Sequence[tuple[type | ModuleType, str]] = (
    (HybridDeviceOptimizer, "_init_sub_optimizers"),
    (HybridDeviceOptimizer, "_set_sub_optimizer_grads"),
    (sys.modules[__name__], "_start"),
)
"""Functions of a ``HybridDeviceOptimizer`` that allocate on the host: (owner, name)."""


def gpu_tensors(optimizer: object) -> Iterator[Tensor]:
    """Yield a ``HybridDeviceOptimizer``'s tensors on the GPU; nothing for other optimizers."""
    part: torch.optim.Optimizer | None = getattr(optimizer, "gpu_optimizer", None)
    if part is None:
        return
    for group in part.param_groups:
        for parameter in group["params"]:
            yield parameter
            yield from (tensor for tensor in part.state.get(parameter, {}).values() if isinstance(tensor, Tensor))
            if parameter.grad is not None:
                yield parameter.grad


def hybrid_settings(optimizer: MegatronOptimizer) -> Set[str]:
    """Return a ``HybridDeviceOptimizer``'s settings in its groups: classes, which a checkpoint must not hold."""
    return optimizer.optimizer.defaults.keys() - _ADAM_KEYS if is_offloaded(optimizer) else frozenset()


def _load_state_dict(optimizer: DistributedOptimizer, state: dict[str, Any]) -> None:
    """Restore the number of updates and the parameter state of a checkpoint, in place."""
    hybrid: HybridDeviceOptimizer = optimizer.optimizer
    step = max(group.get("step") or 0 for group in state["optimizer"]["param_groups"])
    for part in hybrid.sub_optimizers:
        if part is hybrid.gpu_optimizer:
            for group in part.param_groups:
                group["step"] = step
        else:
            for values in part.state.values():
                values["step"].fill_(step)
    if "param_state" in state:
        optimizer.load_parameter_state_from_fully_reshardable(state["param_state"])
