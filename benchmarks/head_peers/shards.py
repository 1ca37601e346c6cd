"""What the re-expressions share: a vocabulary shard, its collectives, and the plain head."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from head_peers.task import Task

BLOCK_ROWS = 16
"""rows of what a fused or compiled kernel upstream keeps on the chip: here the block stays in the cache"""


def reduced(values: Tensor, group: ProcessGroup | None, largest: bool = False) -> Tensor:
    """All-reduce in place: the sum, or the largest."""
    if group is not None:
        dist.all_reduce(values, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    return values


def local(ids: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Which ids are of this shard, and their place in it (0 for the others)."""
    mine = (ids >= first) & (ids < first + width)
    return mine, torch.where(mine, ids - first, 0)


def picked(rows: Tensor, ids: Tensor, first: int) -> Tensor:
    """``rows[t, ids[t, k]]``, 0 where the id is of another shard; ids ``[N]`` or ``[N, K]``."""
    mine, place = local(ids if ids.dim() == 2 else ids[:, None], first, rows.shape[1])
    found = torch.where(mine, rows.gather(1, place), 0.0)
    return found if ids.dim() == 2 else found.squeeze(1)


def fp32_logits(task: Task) -> Tensor:
    """``[N, V_local]``: a GEMM in the dtype of the model, then fp32 (Megatron's Float16Module), then the temperature.

    verl and Stable-RL divide in place, also by 1.
    """
    return (task.hidden @ task.weight.t()).float().div_(task.temperature)


def row_dot(left: Tensor, right: Tensor) -> Tensor:
    """``[N, 1]`` sums of products over each row, by blocks of rows: a stand-in for kernels that keep no product."""
    blocks = zip(left.split(BLOCK_ROWS), right.split(BLOCK_ROWS), strict=True)
    return torch.cat([(a * b).sum(1, keepdim=True) for a, b in blocks])
