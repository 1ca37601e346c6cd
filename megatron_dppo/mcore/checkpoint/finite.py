"""Check that weights and optimizer state are finite on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_dppo.mcore.optim import Optimizer, optimizer_tensors


def all_finite(models: Sequence[GPTModel], optimizer: Optimizer) -> bool:
    """Return True if no weight, moment or main parameter of any rank is infinite or NaN; a collective."""
    weights = [parameter for model in models for parameter in model.parameters()]
    worst = torch.zeros((), dtype=torch.int32, device=weights[0].device)
    for tensor in (*weights, *optimizer_tensors(optimizer)):
        worst = torch.maximum(worst, _is_nonfinite(tensor).to(worst))
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return not int(worst)


def _is_nonfinite(tensor: Tensor) -> Tensor:
    # Both are NaN if one element is.
    smallest, largest = torch.aminmax(tensor.detach())
    return ~(smallest.isfinite() & largest.isfinite())
