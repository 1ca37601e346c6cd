"""Core attention by torch's scaled_dot_product_attention, for packed rows (Megatron's THD layout)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_dppo.parallel.context import ContextShard
from megatron_dppo.types import MicroBatch

if TYPE_CHECKING:
    from megatron_dppo.mcore.layer_noise import RowNoise

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
class LengthBucket:
    """Sequences that are computed together."""

    queries: Padded
    """in this rank's share of the row"""
    keys: Padded
    """in the whole row"""
    positions: Tensor | None
    """``[sequences, longest]`` of the queries in their whole sequence; None = a query's slot is its position"""


def buckets(starts: Sequence[int], positions: Tensor, shard: ContextShard | None) -> list[LengthBucket]:
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
            result.append(LengthBucket(keys, keys, None))
            continue
        own = Padded.of([(spans[i][0] // size, spans[i][1] // size) for i in group], positions.device)
        # An empty slot gets position 0: it sees one key, so its softmax is defined and its result is dropped.
        result.append(LengthBucket(own, keys, own.spread(shard.split(positions))))
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


_CPU_FP32_LENGTH = 256
"""Up to this length bf16 attention on a CPU is computed in fp32: the backward of torch 2.13 takes twice as long in bf16
at 64 tokens, as long at 256, and two thirds of the time at 2,048 (AMD EPYC with AVX-512 BF16)."""


@dataclass
class PackedRow(PackedSeqParams):
    """Megatron's PackedSeqParams with what attention needs to lay out a row; made once a row, for all layers."""

    starts: tuple[int, ...] = ()
    """``[sequences + 1]``, on the host"""
    positions: Tensor | None = None
    """[T] of every token of the row in its sequence"""
    shard: ContextShard | None = None
    """the tokens of the row that this rank computes; None = all of them"""
    noise: RowNoise | None = None
    """for the layers' inputs; it travels here because a layer that runs again for its activations gets this again"""

    @classmethod
    def from_batch(cls, batch: MicroBatch, starts: Sequence[int], shard: ContextShard | None = None) -> PackedRow:
        """The parameters of one packed micro-batch; ``starts`` is its ``cu_seqlens`` on the host."""
        return cls(
            qkv_format="thd",
            cu_seqlens_q=batch.cu_seqlens,
            cu_seqlens_kv=batch.cu_seqlens,
            max_seqlen_q=batch.max_seqlen,
            max_seqlen_kv=batch.max_seqlen,
            starts=tuple(starts),
            positions=batch.position_ids,
            shard=shard,
        )

    @cached_property
    def buckets(self) -> list[LengthBucket]:
        """The sequences in groups of similar length."""
        assert self.positions is not None
        return buckets(self.starts, self.positions, self.shard)


class SDPACoreAttention(MegatronModule):
    """Causal attention with grouped queries over packed sequences.

    Each group of sequences of similar length is laid out as ``[sequences, longest]`` for one batched call; padding sits
    on the right, where the causal mask hides it.

    Under context parallelism each rank gathers all keys and values, and computes the rows of its own queries.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        del layer_number, attn_mask_type, attention_type
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ValueError(f"SDPACoreAttention has no dropout, got attention_dropout={dropout}")
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """``query [T, heads, d]``, ``key [T, groups, d]`` and ``value [T, groups, e]`` to ``[T, heads * e]``."""
        del attention_mask, attn_mask_type, attention_bias
        if not isinstance(packed_seq_params, PackedRow):
            raise ValueError(
                "SDPACoreAttention expects packed rows: packed_seq_params=PackedRow.from_batch(batch, starts)"
            )
        shard = packed_seq_params.shard
        if shard is not None:
            key, value = shard.gather_for_partial(key), shard.gather_for_partial(value)
        found = []
        for bucket in packed_seq_params.buckets:
            mask = None if bucket.positions is None else _causal_mask(bucket.positions, bucket.keys.longest)
            parts = bucket.queries.spread(query), bucket.keys.spread(key), bucket.keys.spread(value)
            found.append(bucket.queries.collect(self._attend(*parts, mask)))
        tokens = torch.cat([bucket.queries.tokens for bucket in packed_seq_params.buckets])
        # Values may have heads of another size than queries and keys.
        empty = value.new_empty(*query.shape[:-1], value.shape[-1])
        return empty.index_copy(0, tokens, torch.cat(found)).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """``query [batch, q, heads, d]``, ``key, value [batch, s, groups, d or e]`` to ``[batch, q, heads, e]``."""
        dtype = query.dtype
        if query.device.type == "cpu" and dtype == torch.bfloat16 and key.shape[1] <= _CPU_FP32_LENGTH:
            query, key, value = query.float(), key.float(), value.float()
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        repeat = q.shape[1] // k.shape[1]
        # Without the copies the backward needs less memory; with a mask, CUDA's fast kernels know no groups.
        groups = repeat > 1 and mask is None
        if repeat > 1 and not groups:
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale, enable_gqa=groups
        )
        return out.transpose(1, 2).to(dtype)


def _causal_mask(positions: Tensor, keys: int) -> Tensor:
    """``positions [batch, q]`` of the queries to ``[batch, 1, q, keys]`` bool, True = visible."""
    return positions[:, None, :, None] >= torch.arange(keys, device=positions.device)
