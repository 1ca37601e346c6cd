"""Context parallelism: split a packed row over ranks, and gather per-token tensors.

Every sequence of the row is cut into ``2 * size`` chunks of equal length; rank r takes chunk r and chunk
``2 * size - 1 - r``, so that causal attention costs each rank the same (Megatron's and Transformer Engine's zig-zag
order). The row and each of its sequences must be padded to a multiple of ``2 * size`` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ContextShard:
    """Shard of one packed row of T tokens that this rank computes."""

    index: Tensor
    """Positions of this rank's tokens in the row. Int64, shape [T / size]."""
    order: Tensor
    """Index of each token of the row in the concatenation of all ranks' shards. Int64, shape [T]."""
    group: ProcessGroup

    @classmethod
    def of(cls, cu_seqlens: Tensor, group: ProcessGroup) -> ContextShard:
        """Return this rank's shard of the row whose sequences start at ``cu_seqlens``."""
        size = group.size()
        shards = [zigzag_index(cu_seqlens, rank, size) for rank in range(size)]
        together = torch.cat(shards)
        order = torch.empty_like(together)
        # ``order`` inverts the permutation ``together``.
        order[together] = torch.arange(together.numel(), device=together.device)
        return cls(shards[group.rank()], order, group)

    def to(self, device: torch.device) -> ContextShard:
        """Return the same shard with its indices on ``device``."""
        return ContextShard(self.index.to(device), self.order.to(device), self.group)

    def split(self, values: Tensor) -> Tensor:
        """Return this rank's tokens ``[T / size, ...]`` of a row ``[T, ...]``."""
        return values[self.index]

    def gather(self, values: Tensor) -> Tensor:
        """Gather ``[T / size, ...]`` of every rank to the row ``[T, ...]``, equal on all ranks.

        Backward gives each rank the gradient of its own shard and sums nothing: every rank must compute the same
        function of the gathered row, for example a loss. One all-gather forward, no collective backward.
        """
        return _Gather.apply(values, self, False)

    def gather_for_partial(self, values: Tensor) -> Tensor:
        """Gather the row for a function that each rank computes only partly, such as attention of its own queries.

        Backward sums the gradients of all ranks: one all-gather forward, one reduce-scatter backward.
        """
        return _Gather.apply(values, self, True)

    def tokens_to_heads(self, values: Tensor, sections: Sequence[int]) -> Tensor:
        """Exchange this rank's tokens of all heads for all tokens of this rank's heads: one all-to-all each way.

        ``sections`` are the columns of each kind in ``values [T / size, sum(sections)]``. Rank r gets the r-th of
        ``size`` parts of each: the row ``[T, sum(sections) / size]``, each kind after the other.
        """
        parts = [kind.chunk(self.group.size(), -1) for kind in values.split(list(sections), -1)]
        by_rank = torch.stack([torch.cat(kinds, -1) for kinds in zip(*parts, strict=True)])
        return _AllToAll.apply(by_rank, self.group).flatten(0, 1)[self.order]

    def heads_to_tokens(self, values: Tensor) -> Tensor:
        """Exchange all tokens ``[T, columns]`` of this rank's heads for ``[T / size, size * columns]``, its tokens.

        The inverse of ``tokens_to_heads`` for one kind: one all-to-all each way.
        """
        by_rank = torch.empty_like(values).index_copy(0, self.order, values)
        exchanged = _AllToAll.apply(by_rank.unflatten(0, (self.group.size(), -1)), self.group)
        return exchanged.transpose(0, 1).flatten(1)


def zigzag_index(cu_seqlens: Tensor, rank: int, size: int) -> Tensor:
    """Return the positions in the row that ``rank`` of ``size`` computes, int64 [T / size].

    ``cu_seqlens [num_sequences + 1]`` are the starts of the sequences, and T.

    Raises:
        ValueError: If there is a sequence whose length is no multiple of ``2 * size``.
    """
    lengths = cu_seqlens.diff()
    if bool((lengths % (2 * size)).any()):
        bad = int((lengths % (2 * size)).nonzero()[0])
        raise ValueError(
            f"Sequence {bad} of the packed row has {int(lengths[bad])} tokens; context parallelism over {size} ranks "
            f"needs a multiple of {2 * size}. Fix: pack with sequence_multiple = {2 * size}."
        )
    parts = []
    for start, length in zip(cu_seqlens[:-1].tolist(), lengths.tolist(), strict=True):
        chunk = length // (2 * size)
        # One chunk from the front and its mirror image from the back: causal attention costs each rank the same.
        for number in (rank, 2 * size - 1 - rank):
            parts.append(torch.arange(start + number * chunk, start + (number + 1) * chunk))
    return torch.cat(parts).to(cu_seqlens.device)


class _AllToAll(torch.autograd.Function):
    """Send ``values[r]`` to rank r, and return what each rank sent."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(values, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, values.contiguous(), group=group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Sending back what was received is the transposed map.
        sent = torch.empty_like(grad, memory_format=torch.contiguous_format)
        dist.all_to_all_single(sent, grad.contiguous(), group=ctx.group)
        return sent, None


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
            # Every rank computed the same function of the whole row, so each has the whole gradient already. A sum
            # would count it ``size`` times.
            return grad[shard.index], None, None
        by_rank = torch.empty_like(grad, memory_format=torch.contiguous_format)
        # From the order of the row back to the order of the ranks, which the reduce-scatter splits.
        by_rank[shard.order] = grad
        shard_grad = torch.empty_like(by_rank[: shard.index.numel()])
        dist.reduce_scatter_tensor(shard_grad, by_rank, group=shard.group)
        return shard_grad, None, None
