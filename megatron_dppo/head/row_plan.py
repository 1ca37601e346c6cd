"""Which rows the fused head computes, and how many of them at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

_CUDA_CHUNK_BYTES = 2_500_000_000
"""Bytes of a chunk's logits in float32 on CUDA: 4096 rows at a vocabulary of 151,936. The host needs about 6 ms for a
chunk of any size, so a narrower shard gets more rows (docs/results/head.md)."""
_CPU_CHUNK_BYTES = 96_000_000
"""Bytes of a chunk's logits in float32 on the CPU. Each chunk converts the weight to float32 again, and its small
operations cost the same for few rows as for many."""
_CPU_CHUNK_ROWS = 64
"""Fewer would leave the GEMM waiting for the weight."""
_CPU_GRADIENT_BYTES = 192_000_000
"""Bytes of two-byte gradients of logits that go through the other two GEMMs together."""
_CPU_GRADIENT_ROWS = 128
"""Fewer would leave those GEMMs waiting for the weight and its gradient."""


@dataclass(frozen=True)
class RowPlan:
    """The rows of ``[T, H]`` hidden states that matter; the others are not computed."""

    rows: Tensor
    """[R] int64 on the device of the hidden states, the rows with loss; those with a gradient that is not 0 first"""
    num_gradient: int
    """Number of rows that have a gradient. Backward skips the others."""
    on_host: Tensor | None = None
    """The rows on the CPU, which select sampling masks. None costs a synchronization."""

    @classmethod
    def of(cls, loss_mask: Tensor, advantages: Tensor | None, device: torch.device | str | None = None) -> Self:
        """Make a plan from tensors ``[T]`` on the host, so that nothing waits for the device.

        Rows with advantage 0 have no gradient. Without ``advantages`` every row with loss has one, as with an entropy
        bonus or a KL penalty.
        """
        for name, column in (("loss_mask", loss_mask), ("advantages", advantages)):
            if column is not None and (column.device.type != "cpu" or column.shape != loss_mask.shape[:1]):
                raise ValueError(
                    f"{name} must be [T] on the CPU like loss_mask, got {tuple(column.shape)} on {column.device}; "
                    "plan the rows before the batch moves to the device"
                )
        if loss_mask.dtype != torch.bool:
            raise ValueError(f"loss_mask must be bool, got {loss_mask.dtype}")
        with_gradient = loss_mask if advantages is None else loss_mask & (advantages != 0)
        first = with_gradient.nonzero().squeeze(1)
        rows = torch.cat([first, (loss_mask & ~with_gradient).nonzero().squeeze(1)])
        if device is not None and torch.device(device).type == "cuda":
            # A copy from pageable memory would wait for the device.
            rows = rows.pin_memory()
        return cls(rows if device is None else rows.to(device, non_blocking=True), len(first), rows)


@dataclass(frozen=True)
class RowChunk:
    """Some rows of the plan, one after the other."""

    start: int
    stop: int
    num_gradient: int
    """Number of rows, from the first on, that have a gradient."""


@dataclass(frozen=True)
class Rows:
    """A plan, or all rows, for ``[T, ...]`` tensors."""

    length: int
    """T"""
    plan: RowPlan | None

    @classmethod
    def of(cls, hidden: Tensor, plan: RowPlan | None) -> Self:
        """Check that the plan fits ``hidden [T, H]``."""
        if plan is not None:
            rows = plan.rows
            if rows.dim() != 1 or rows.dtype != torch.int64 or rows.device != hidden.device:
                raise ValueError(
                    f"plan.rows must be [R] int64 on {hidden.device}, got {tuple(rows.shape)} {rows.dtype} "
                    f"on {rows.device}"
                )
            if not 0 <= plan.num_gradient <= len(rows) <= len(hidden):
                raise ValueError(
                    f"expected 0 <= num_gradient <= rows <= T, got {plan.num_gradient}, {len(rows)}, {len(hidden)}"
                )
        return cls(len(hidden), plan)

    @property
    def count(self) -> int:
        """R, how many rows are computed."""
        return self.length if self.plan is None else len(self.plan.rows)

    @property
    def num_gradient(self) -> int:
        """Number of rows, from the first on, that have a gradient."""
        return self.length if self.plan is None else self.plan.num_gradient

    def take(self, values: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """``[T, ...]`` to the rows from ``start`` to ``stop`` of the plan; a view where there is no plan."""
        if self.plan is None:
            return values[start:stop]
        return values.index_select(0, self.plan.rows[start:stop])

    def spread(self, values: Tensor) -> Tensor:
        """``[n, ...]`` of the first n rows of the plan to ``[T, ...]``, 0 (or False) in the others."""
        if self.plan is None and len(values) == self.length:
            return values
        result = values.new_zeros(self.length, *values.shape[1:])
        if self.plan is None:
            result[: len(values)] = values
            return result
        return result.index_copy_(0, self.plan.rows[: len(values)], values)

    def chunks(self, size: int, stop: int | None = None) -> Iterator[RowChunk]:
        """Yield the rows up to ``stop`` (None = all) in chunks of ``size``, the last one shorter."""
        end = self.count if stop is None else stop
        for start in range(0, end, size):
            last = min(start + size, end)
            yield RowChunk(start, last, min(max(self.num_gradient - start, 0), last - start))


def chunk_size(given: int | None, rows: Rows, weight: Tensor, in_flight: int = 1, ranks: int = 1) -> int:
    """``given``, or the default for a shard ``weight [V_local, H]``; on the CPU the ranks share memory and cache."""
    if given is None:
        sharing = in_flight if weight.is_cuda else ranks
        return default_chunk_tokens(rows.count, len(weight), weight.device, sharing)
    if given < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {given}")
    return given


def chunks_in_flight(device: torch.device, group: ProcessGroup | None) -> int:
    """Return the number of chunks whose logits are in memory at a time.

    Two if the collective of one is hidden behind the GEMM of the next. On the CPU the collective takes at most a tenth
    of that GEMM, and new memory costs more than that.
    """
    return 2 if device.type == "cuda" and group is not None else 1


def default_chunk_tokens(rows: int, width: int, device: torch.device, in_flight: int = 1) -> int:
    """Rows in a chunk: all chunks of ``rows`` about equal, and those in flight at a time within a memory budget.

    The budget of the device is 2.5 GB of float32 logits ``[n, width]`` on CUDA, 96 MB on the CPU (more if the shard is
    so wide that a chunk would be too short for a fast GEMM). ``in_flight`` counts the chunks that share it: those of
    this rank, on the CPU those of all ranks.
    """
    if device.type == "cuda":
        most = max(_CUDA_CHUNK_BYTES // (4 * width * in_flight), 1)
    else:
        most = max(_CPU_CHUNK_BYTES // (4 * width * in_flight), _CPU_CHUNK_ROWS)
    # Equal chunks: a short last one would leave the GEMM waiting for the weight.
    number = max(1, -(-rows // most))
    return max(1, -(-rows // number))


def gradient_rows(rows: int, chunk: int, width: int) -> int:
    """Return how many rows of two-byte gradients are together in CPU memory: whole chunks, about 192 MB."""
    most = max(_CPU_GRADIENT_BYTES // (2 * width), _CPU_GRADIENT_ROWS, chunk)
    times = max(1, -(-rows // most))
    return -(-max(1, -(-rows // times)) // chunk) * chunk
