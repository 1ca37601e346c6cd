"""The optimizer's state in host memory: what Megatron's ``HybridDeviceOptimizer`` does not do right.

Reasons: it makes its moments by an update with random gradients; its checkpoint holds classes, and to load one it
copies the bf16 weights to the host again and moves the state about; the number of updates that it loads is put back
before each update of what stayed on the GPU, so that Adam's bias correction stands still. Here moments start as zeros,
and a checkpoint is that of the optimizer without offloading: each continues what the other began.
Affected: Megatron Core 0.16.1 to 0.19.2. Delete it when Megatron's own continues bit for bit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence, Set
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

_OF_ADAM = frozenset({"lr", "weight_decay", "betas", "eps", "bias_correction"})


def is_offloaded(optimizer: Any) -> bool:
    """Whether a part of Megatron's optimizer keeps state on the host."""
    return isinstance(optimizer.optimizer, HybridDeviceOptimizer)


def start_offloaded(optimizer: DistributedOptimizer) -> None:
    """Create the moments, and let ``optimizer`` load checkpoints as without offloading."""
    _start(optimizer.optimizer)
    optimizer.load_state_dict = partial(_load_state_dict, optimizer)


def offloaded_tensors(optimizer: DistributedOptimizer) -> Iterator[Tensor]:
    """The fp32 copies and moments, wherever they are."""
    for state in optimizer.optimizer.state.values():
        yield from (tensor for name, tensor in state.items() if name != "step")


def drop_gradient_copies(optimizer: DistributedOptimizer) -> None:
    """Forget the fp32 copies of bf16 gradients that the GPU's part of an update has left on the GPU."""
    part = optimizer.optimizer.gpu_optimizer
    for group in part.param_groups if part is not None else ():
        for parameter in group["params"]:
            parameter.grad = None


def _start(hybrid: HybridDeviceOptimizer) -> None:
    for part in hybrid.sub_optimizers:
        for group in part.param_groups:
            for parameter in group["params"]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                own_step = {} if part is hybrid.gpu_optimizer else {"step": torch.zeros((), dtype=torch.float32)}
                part.state[parameter] = own_step | moments
    hybrid._sync_sub_optimizers_state_to_hdo()


PLACES: Sequence[tuple[Any, str]] = (
    (HybridDeviceOptimizer, "_init_sub_optimizers"),
    (HybridDeviceOptimizer, "_set_sub_optimizer_grads"),
    (sys.modules[__name__], "_start"),
)
"""Functions of a ``HybridDeviceOptimizer`` that allocate on the host: (owner, name)."""


def gpu_tensors(optimizer: Any) -> Iterator[Tensor]:
    """What a ``HybridDeviceOptimizer`` keeps beside the GPU's weights; nothing for an optimizer of another kind."""
    part: Any = getattr(optimizer, "gpu_optimizer", None)
    for group in part.param_groups if part is not None else ():
        for parameter in group["params"]:
            yield parameter
            yield from (tensor for tensor in part.state.get(parameter, {}).values() if isinstance(tensor, Tensor))
            if parameter.grad is not None:
                yield parameter.grad


def hybrid_settings(optimizer: Any) -> Set[str]:
    """Return the names of a ``HybridDeviceOptimizer``'s settings in its parameter groups; none for other optimizers.

    They hold classes, which a checkpoint must not.
    """
    return optimizer.optimizer.defaults.keys() - _OF_ADAM if is_offloaded(optimizer) else frozenset()


def _load_state_dict(optimizer: DistributedOptimizer, state: dict[str, Any]) -> None:
    """Take the number of updates from a checkpoint, and what it holds of the parameters, in place."""
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
