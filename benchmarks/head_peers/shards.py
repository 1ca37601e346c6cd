"""Shared parts of the re-expressions: a vocabulary shard, its collectives, and the plain head."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from head_peers.task import Task

BLOCK_ROWS = 16
"""Rows of a block that a fused or compiled kernel upstream keeps on the chip; here it stays in the cache."""


def reduced(values: Tensor, group: ProcessGroup | None, largest: bool = False) -> Tensor:
    """All-reduce in place: the sum, or the largest."""
    if group is not None:
        dist.all_reduce(values, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    return values


def local(ids: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Return which ids belong to this shard, and their local ids (0 for ids of other shards)."""
    is_local = (ids >= first) & (ids < first + width)
    return is_local, torch.where(is_local, ids - first, 0)


def picked(rows: Tensor, ids: Tensor, first: int) -> Tensor:
    """Return ``rows[t, ids[t, k]]``, 0 where the id is of another shard; ids ``[N]`` or ``[N, K]``."""
    is_local, local_ids = local(ids if ids.dim() == 2 else ids[:, None], first, rows.shape[1])
    values_at_ids = torch.where(is_local, rows.gather(1, local_ids), 0.0)
    return values_at_ids if ids.dim() == 2 else values_at_ids.squeeze(1)


def fp32_logits(task: Task) -> Tensor:
    """Return ``[N, V_local]`` logits: a GEMM in the model dtype, then fp32 (Float16Module), then the temperature.

    verl and Stable-RL divide in place, also by 1.
    """
    return (task.hidden @ task.weight.t()).float().div_(task.temperature)


def row_dot(left: Tensor, right: Tensor) -> Tensor:
    """Return ``[N, 1]`` sums of products over each row, by blocks: a stand-in for kernels that keep no product."""
    blocks = zip(left.split(BLOCK_ROWS), right.split(BLOCK_ROWS), strict=True)
    return torch.cat([(a * b).sum(1, keepdim=True) for a, b in blocks])
