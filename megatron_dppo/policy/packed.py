"""One rank's part of a batch as packed micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.losses import BatchTotals
from megatron_dppo.types import MicroBatches


@dataclass(frozen=True, kw_only=True)
class Packed:
    """One rank's part of a batch, ready for the schedule."""

    bins: list[list[int]]
    """for each micro-batch, the indices of its samples in the order of the row"""
    batches: MicroBatches
    totals: BatchTotals
    """of all ranks"""


def of_all_ranks(values: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """``[ranks, len(values)]``"""
    mine = torch.tensor(values)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    return torch.stack(every)
