"""Context parallelism: which tokens of a packed row a rank computes, and how per-token tensors come together again.

Every sequence of the row is cut into ``2 * size`` chunks of equal length; rank r takes chunk r and chunk
``2 * size - 1 - r``, so that causal attention costs each rank the same (Megatron's and Transformer Engine's zig-zag
order). The row and each of its sequences must be padded to a multiple of ``2 * size`` tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ContextShard:
    """The share of one packed row of T tokens that this rank computes."""

    index: Tensor
    """[T / size] int64, positions of this rank's tokens in the row"""
    order: Tensor
    """[T] int64, where each token of the row stands in the concatenation of all ranks' shares"""
    group: ProcessGroup

    @classmethod
    def of(cls, cu_seqlens: Tensor, group: ProcessGroup) -> ContextShard:
        """The share of this rank of ``group`` in the row whose sequences start at ``cu_seqlens``.

        Raises:
            ValueError: a sequence whose length is no multiple of ``2 * size``.
        """
        size = group.size()
        shares = [zigzag_index(cu_seqlens, rank, size) for rank in range(size)]
        together = torch.cat(shares)
        order = torch.empty_like(together)
        order[together] = torch.arange(together.numel(), device=together.device)
        return cls(shares[group.rank()], order, group)

    def to(self, device: torch.device) -> ContextShard:
        """The same share with its indices on ``device``."""
        return ContextShard(self.index.to(device), self.order.to(device), self.group)

    def split(self, values: Tensor) -> Tensor:
        """``[T, ...]`` to this rank's ``[T / size, ...]``."""
        return values[self.index]

    def gather(self, values: Tensor) -> Tensor:
        """``[T / size, ...]`` of every rank to the row ``[T, ...]``, equal on all ranks.

        Backward gives each rank the gradient of its own share and sums nothing: every rank is expected to compute the
        same function of the gathered row, a loss for example. One all-gather forward, no collective backward.
        """
        return self._gather(values, reduces=False)

    def gather_for_partial(self, values: Tensor) -> Tensor:
        """The same row for a function that each rank computes only a part of, such as attention of its own queries.

        Backward sums the gradients of all ranks: one all-gather forward, one reduce-scatter backward.
        """
        return self._gather(values, reduces=True)

    def _gather(self, values: Tensor, reduces: bool) -> Tensor:
        apply: Callable[..., Tensor] = _Gather.apply
        return apply(values, self, reduces)


def zigzag_index(cu_seqlens: Tensor, rank: int, size: int) -> Tensor:
    """Positions in the row that ``rank`` of ``size`` computes, ``[T / size]`` int64.

    Args:
        cu_seqlens: ``[sequences + 1]`` starts of the sequences, the last entry is T.
        rank: index in the context-parallel group.
        size: of that group.

    Raises:
        ValueError: a sequence whose length is no multiple of ``2 * size``.
    """
    lengths = cu_seqlens.diff()
    if bool((lengths % (2 * size)).any()):
        bad = int((lengths % (2 * size)).nonzero()[0])
        raise ValueError(
            f"sequence {bad} of the packed row has {int(lengths[bad])} tokens; context parallelism over {size} ranks "
            f"needs a multiple of {2 * size}: pack with sequence_multiple = {2 * size}"
        )
    parts = []
    for start, length in zip(cu_seqlens[:-1].tolist(), lengths.tolist(), strict=True):
        chunk = length // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            parts.append(torch.arange(start + number * chunk, start + (number + 1) * chunk))
    return torch.cat(parts).to(cu_seqlens.device)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, shard: ContextShard, reduces: bool) -> Tensor:
        ctx.shard, ctx.reduces = shard, reduces
        parts = [torch.empty_like(values, memory_format=torch.contiguous_format) for _ in range(shard.group.size())]
        dist.all_gather(parts, values.contiguous(), group=shard.group)
        return torch.cat(parts)[shard.order]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        shard: ContextShard = ctx.shard
        if not ctx.reduces:
            return grad[shard.index], None, None
        by_rank = torch.empty_like(grad, memory_format=torch.contiguous_format)
        by_rank[shard.order] = grad
        own = torch.empty_like(by_rank[: shard.index.numel()])
        dist.reduce_scatter_tensor(own, by_rank, group=shard.group)
        return own, None, None
