"""Training samples to packed micro-batches (Megatron's THD layout)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from megatron_dppo.types import MicroBatch, TrainingSample
from megatron_dppo.types.columns import TokenColumn
from megatron_dppo.types.token_columns import TOKEN_COLUMNS


@dataclass(frozen=True, kw_only=True)
class RowShape:
    """What the lengths of a packed row and of its sequences have to be multiples of."""

    row_multiple: int = 1
    """sequence parallelism splits rows over ranks"""
    sequence_multiple: int = 1
    """context parallelism splits every sequence over ranks"""

    def padded(self, tokens: int) -> int:
        """The length of a sequence of ``tokens`` in a row."""
        return -(-tokens // self.sequence_multiple) * self.sequence_multiple


def pack(
    samples: Sequence[TrainingSample], shape: RowShape | None = None, like: TrainingSample | None = None
) -> MicroBatch:
    """Put samples end to end in one row, every one padded to ``shape.sequence_multiple``.

    The row is padded to ``shape.row_multiple`` by one more sequence that is outside the loss. Padding at the end of a
    sequence is causal: nothing before it can see it.

    Args:
        samples: what goes into the row; may be empty, for a rank that only runs the collectives of its peers.
        shape: multiples to pad to; None = no padding.
        like: which optional fields an empty row has; needed only for that.

    Raises:
        ValueError: only some samples have an optional field, or they have it in different shapes or types.
    """
    shape = shape or RowShape()
    like = samples[0] if samples else like
    if like is None:
        raise ValueError("an empty row needs a sample to be like: pass like=")
    lengths = [shape.padded(sample.num_tokens) for sample in samples]
    rest = -sum(lengths) % shape.row_multiple if samples else max(shape.row_multiple, shape.sequence_multiple)
    starts = [0, *accumulate(lengths)][: len(samples)]
    lengths += [rest] if rest else []
    size, ends = sum(lengths), torch.tensor([0, *accumulate(lengths)])
    sample_ends = [start + sample.num_tokens for sample, start in zip(samples, starts, strict=True)]
    columns: dict[str, Any] = {}
    for column in TOKEN_COLUMNS:
        if column.name is None or not column.is_packed:
            continue
        parts = [getattr(sample, column.name) for sample in samples]
        if column.is_optional:
            _check_alike(column, parts)
        if (first := getattr(like, column.name)) is not None:
            columns[column.name] = column.pack(parts, sample_ends, size, first)
    return MicroBatch(
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        sequence_ids=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        cu_seqlens=ends.to(torch.int32),
        max_seqlen=max(lengths),
        num_padding=size - sum(sample.num_tokens for sample in samples),
        **columns,
    )


def _check_alike(column: TokenColumn, parts: Sequence[Any]) -> None:
    forms = {column.form(part) for part in parts}
    if len(forms) > 1:
        words = "with and without" if None in forms else "with different shapes or types of"
        raise ValueError(f"samples {words} {column.title} cannot share a micro-batch")


def fill_bins(samples: Sequence[TrainingSample], budget: int, shape: RowShape | None = None) -> list[list[int]]:
    """Indices of the samples of each micro-batch: first-fit decreasing, at most ``budget`` tokens each.

    Longest first fills the budget best; a sample longer than the budget gets a micro-batch of its own. The same samples
    in the same order give the same split.
    """
    shape = shape or RowShape()
    lengths = [shape.padded(sample.num_tokens) for sample in samples]
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(samples)), key=lambda i: -lengths[i]):
        slot = next((i for i, left in enumerate(room) if lengths[index] <= left), None)
        if slot is None:
            bins.append([])
            room.append(budget)
            slot = len(bins) - 1
        bins[slot].append(index)
        room[slot] -= lengths[index]
    return bins


def split_evenly(bins: list[list[int]], count: int) -> list[list[int]]:
    """Halve the bin with the most samples (the first of equals) until there are ``count``; too few give empty bins.

    Raises:
        ValueError: there are more than ``count`` already.
    """
    if len(bins) > count:
        raise ValueError(f"{len(bins)} micro-batches are needed, more than count = {count}")
    bins = list(bins)
    while len(bins) < count and any(len(part) > 1 for part in bins):
        most = max(range(len(bins)), key=lambda i: len(bins[i]))
        part = bins[most]
        # Every other one: the bin is sorted by length, so the halves cost about the same.
        bins[most : most + 1] = [part[::2], part[1::2]]
    return bins + [[] for _ in range(count - len(bins))]
