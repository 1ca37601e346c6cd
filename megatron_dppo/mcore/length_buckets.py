"""Sequences of a packed row in groups of similar length, each of which is one batched call of attention.

One padded batch of all sequences costs ``n * longest**2``: with a few long responses among many short ones most of it
is padding. Sorted by length and cut where it shrinks, hardly any is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from megatron_dppo.parallel.context import ContextShard

_MOST_PADDED = 1.25
"""slots of a group over its tokens"""
_FREE_SLOTS = 1024
"""Padding that costs less than one more call."""


@dataclass(frozen=True)
class Padded:
    """Where the N tokens of a group lie in a row, and where in ``[sequences, longest]``."""

    tokens: Tensor
    """[N] index in the row"""
    sequences: Tensor
    """[N] row of the padded layout"""
    slots: Tensor
    """[N] column of it"""
    count: int
    longest: int

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int]], device: torch.device) -> Padded:
        """Of sequences that lie at these ``(start, end)`` in a row."""
        lengths = torch.tensor([end - start for start, end in spans])
        slots = torch.cat([torch.arange(end - start) for start, end in spans])
        sequences = torch.repeat_interleave(torch.arange(len(spans)), lengths)
        tokens = torch.tensor([start for start, _ in spans])[sequences] + slots
        tokens, sequences, slots = (x.to(device, non_blocking=True) for x in (tokens, sequences, slots))
        return cls(tokens, sequences, slots, len(spans), int(lengths.max()))

    def spread(self, values: Tensor) -> Tensor:
        """``[T, ...]`` of the row to ``[sequences, longest, ...]``, zeros on the right."""
        target = values.new_zeros(self.count, self.longest, *values.shape[1:])
        return target.index_put((self.sequences, self.slots), values[self.tokens])

    def collect(self, padded: Tensor) -> Tensor:
        """``[sequences, longest, ...]`` to the ``[N, ...]`` of the group's tokens."""
        return padded[self.sequences, self.slots]


@dataclass(frozen=True)
class Bucket:
    """Sequences that are computed together."""

    queries: Padded
    """in this rank's share of the row"""
    keys: Padded
    """in the whole row"""
    positions: Tensor | None
    """``[sequences, longest]`` of the queries in their whole sequence; None = a query's slot is its position"""


def buckets(starts: Sequence[int], positions: Tensor, shard: ContextShard | None) -> list[Bucket]:
    """Groups that hold every sequence once.

    Args:
        starts: ``[sequences + 1]`` where each sequence starts in the row; the last entry is T.
        positions: [T] of every token of the row in its sequence.
        shard: this rank's tokens, which lie sequence by sequence, the same share of each; None = all.
    """
    spans, size = list(pairwise(starts)), 1 if shard is None else shard.group.size()
    result = []
    for group in grouped([end - start for start, end in spans]):
        keys = Padded.of([spans[i] for i in group], positions.device)
        if shard is None:
            result.append(Bucket(keys, keys, None))
            continue
        own = Padded.of([(spans[i][0] // size, spans[i][1] // size) for i in group], positions.device)
        # An empty slot gets position 0: it sees one key, so its softmax is defined and its result is dropped.
        result.append(Bucket(own, keys, own.spread(shard.split(positions))))
    return result


def grouped(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of sequences in groups of similar length, the longest first.

    Example:
        >>> grouped([4000, 900, 4000, 800])
        [[0, 2], [1, 3]]
    """
    groups: list[list[int]] = []
    tokens = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        slots = (len(groups[-1]) + 1) * lengths[groups[-1][0]] if groups else 0
        filled = tokens + lengths[i]
        if groups and slots <= max(_MOST_PADDED * filled, filled + _FREE_SLOTS):
            groups[-1].append(i)
            tokens = filled
        else:
            groups.append([i])
            tokens = lengths[i]
    return groups
