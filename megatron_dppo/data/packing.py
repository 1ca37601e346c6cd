"""Training samples to packed micro-batches (Megatron's THD layout)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from megatron_dppo.types import MISSING_EXPERT, MicroBatch, TrainingSample

_FILL: dict[str, float | dict[torch.dtype, int]] = {
    "rollout_logprobs": 0.0,
    "rollout_topk_ids": -1,
    "rollout_topk_logprobs": 0.0,
    "anchor_logprobs": 0.0,
    "reference_logprobs": 0.0,
    "routed_experts": dict(MISSING_EXPERT),
}
"""Per-token fields that may be None, and what stands in them on padding (which is outside the loss), by dtype where
that makes a difference."""


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
        ValueError: only some samples have an optional field; neither dropping nor inventing it is right.
    """
    shape = shape or RowShape()
    like = samples[0] if samples else like
    if like is None:
        raise ValueError("an empty row needs a sample to be like: pass like=")
    rows = [_pad(sample, shape.padded(sample.num_tokens) - sample.num_tokens) for sample in samples]
    filled = sum(row.num_tokens for row in rows)
    rest = -filled % shape.row_multiple if rows else max(shape.row_multiple, shape.sequence_multiple)
    if rest:
        rows.append(_padding_like(like, rest))
    lengths = torch.tensor([row.num_tokens for row in rows])
    ends = lengths.cumsum(0)
    return MicroBatch(
        tokens=torch.cat([row.tokens for row in rows]),
        labels=torch.cat([row.labels for row in rows]),
        loss_mask=torch.cat([row.loss_mask for row in rows]),
        advantages=torch.cat([row.advantages for row in rows]),
        position_ids=torch.cat([torch.arange(int(n)) for n in lengths]),
        sequence_ids=torch.repeat_interleave(torch.arange(len(rows)), lengths),
        cu_seqlens=torch.cat([ends.new_zeros(1), ends]).to(torch.int32),
        max_seqlen=int(lengths.max()),
        num_padding=int(ends[-1]) - sum(sample.num_tokens for sample in samples),
        **{name: _joined(rows, name) for name in _FILL},
    )


def _joined(rows: Sequence[TrainingSample], name: str) -> torch.Tensor | None:
    values = [getattr(row, name) for row in rows]
    present = [value for value in values if value is not None]
    if len(present) == len(values):
        return torch.cat(present)
    if present:
        raise ValueError(f"samples with and without {name} cannot share a micro-batch")
    return None


def _pad(sample: TrainingSample, count: int) -> TrainingSample:
    """The sample with ``count`` positions more, outside the loss."""
    if not count:
        return sample
    values = {
        name: F.pad(getattr(sample, name), (0, count)) for name in ("tokens", "labels", "loss_mask", "advantages")
    }
    for name, fill in _FILL.items():
        if (value := getattr(sample, name)) is not None:
            number = fill[value.dtype] if isinstance(fill, dict) else fill
            values[name] = torch.cat([value, value.new_full((count, *value.shape[1:]), number)])
    return replace(sample, **values)


def _padding_like(sample: TrainingSample, length: int) -> TrainingSample:
    """Nothing but padding, with the optional fields of ``sample``."""
    empty = {name: value[:0] for name, value in vars(sample).items() if value is not None}
    return _pad(TrainingSample(**empty), length)


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
