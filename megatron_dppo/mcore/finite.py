"""Whether weights and optimizer state are finite, on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_dppo.mcore.optim import Optimizer


def all_finite(models: Sequence[GPTModel], optimizer: Optimizer) -> bool:
    """Whether no weight, moment or fp32 copy of any rank is infinite or NaN (a collective: one number).

    Every tensor is read once and nothing of its size is allocated.
    """
    weights = [parameter for model in models for parameter in model.parameters()]
    worst = torch.zeros((), dtype=torch.int32, device=weights[0].device)
    for tensor in (*weights, *_optimizer_tensors(optimizer)):
        worst = torch.maximum(worst, _is_broken(tensor).to(worst))
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return not int(worst)


def _is_broken(tensor: Tensor) -> Tensor:
    smallest, largest = torch.aminmax(tensor.detach())  # both are NaN when one element is
    return ~(smallest.isfinite() & largest.isfinite())


def _optimizer_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    for part in optimizer.megatron.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        for group in part.optimizer.param_groups:
            yield from _filled(group["params"])
        for state in part.optimizer.state.values():
            yield from _filled(state.values())


def _filled(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            yield value
