"""Core attention by torch's scaled_dot_product_attention, for packed rows (Megatron's THD layout)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_dppo.parallel.context import ContextShard
from megatron_dppo.types import MicroBatch


@dataclass
class PackedRow(PackedSeqParams):
    """Megatron's PackedSeqParams with the index of every token, so that attention needs no host sync."""

    sequence_ids: Tensor | None = None
    """[T] which sequence a token belongs to"""
    positions: Tensor | None = None
    """[T] its position inside that sequence"""
    shard: ContextShard | None = None
    """the tokens of the row that this rank computes; None = all of them"""

    @classmethod
    def of(cls, batch: MicroBatch, shard: ContextShard | None = None) -> PackedRow:
        """The parameters of one packed micro-batch."""
        return cls(
            qkv_format="thd",
            cu_seqlens_q=batch.cu_seqlens,
            cu_seqlens_kv=batch.cu_seqlens,
            max_seqlen_q=batch.max_seqlen,
            max_seqlen_kv=batch.max_seqlen,
            sequence_ids=batch.sequence_ids,
            positions=batch.position_ids,
            shard=shard,
        )


class SDPACoreAttention(MegatronModule):
    """Causal attention with grouped queries over packed sequences.

    The packed row is laid out as ``[sequences, longest]`` for one batched call; padding sits on the right, where the
    causal mask hides it. A pack whose padded area would be more than ``_MAX_PADDING`` times its tokens is computed
    sequence by sequence instead.

    Under context parallelism each rank gathers all keys and values, and computes the rows of its own queries.
    """

    _MAX_PADDING = 4

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
        """Attention of ``query [T, heads, d]`` over ``key, value [T, groups, d]``; returns ``[T, heads * d]``."""
        del attention_mask, attn_mask_type, attention_bias
        if not isinstance(packed_seq_params, PackedRow):
            raise ValueError("SDPACoreAttention expects packed rows: pass packed_seq_params=PackedRow.of(micro_batch)")
        shard = packed_seq_params.shard
        if shard is not None:
            key, value = shard.gather_for_partial(key), shard.gather_for_partial(value)
        queries, keys = _Layout.of_queries(packed_seq_params), _Layout.of_row(packed_seq_params)
        if keys.area <= self._MAX_PADDING * key.shape[0]:
            return self._batched(query, key, value, queries, keys, is_sharded=shard is not None).flatten(1)
        rows = []
        for own, whole in zip(queries.slices(), keys.slices(), strict=True):
            mask = None if shard is None else _causal_mask(queries.positions[own][None], whole.stop - whole.start)
            rows.append(self._attend(query[own][None], key[whole][None], value[whole][None], mask)[0])
        return torch.cat(rows).flatten(1)

    def _batched(
        self, query: Tensor, key: Tensor, value: Tensor, queries: _Layout, keys: _Layout, *, is_sharded: bool
    ) -> Tensor:
        mask = None
        if is_sharded:
            # An empty slot gets position 0: it sees one key, so its softmax is defined and its result is dropped.
            mask = _causal_mask(queries.spread(queries.positions), keys.longest)
        out = self._attend(queries.spread(query), keys.spread(key), keys.spread(value), mask)
        return out[queries.sequence_ids, queries.slots]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """``query [batch, q, heads, d]``, ``key, value [batch, s, groups, d]`` to the shape of ``query``."""
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        repeat = q.shape[1] // k.shape[1]
        if repeat > 1:
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale)
        return out.transpose(1, 2)


def _causal_mask(positions: Tensor, keys: int) -> Tensor:
    """``positions [batch, q]`` of the queries to ``[batch, 1, q, keys]`` bool, True = visible."""
    return positions[:, None, :, None] >= torch.arange(keys, device=positions.device)


@dataclass(frozen=True)
class _Layout:
    """How the tokens of a row, or of this rank's share of it, lie in ``[sequences, longest]``."""

    sequence_ids: Tensor
    """[N] the sequence of each token"""
    slots: Tensor
    """[N] its place in the padded layout of that sequence"""
    positions: Tensor
    """[N] its position in the whole sequence"""
    starts: Tensor
    """[sequences + 1]"""
    longest: int

    @classmethod
    def of_row(cls, row: PackedRow) -> _Layout:
        assert row.sequence_ids is not None and row.positions is not None
        return cls(row.sequence_ids, row.positions, row.positions, row.cu_seqlens_q, row.max_seqlen_q)

    @classmethod
    def of_queries(cls, row: PackedRow) -> _Layout:
        whole = cls.of_row(row)
        if row.shard is None:
            return whole
        size = row.shard.group.size()
        starts = whole.starts // size
        ids = row.shard.split(whole.sequence_ids)
        slots = torch.arange(ids.numel(), device=ids.device) - starts[ids]
        return cls(ids, slots, row.shard.split(whole.positions), starts, whole.longest // size)

    @property
    def area(self) -> int:
        """Cells of the padded layout."""
        return (self.starts.numel() - 1) * self.longest

    def spread(self, values: Tensor) -> Tensor:
        """``[N, ...]`` to ``[sequences, longest, ...]``, zeros on the right."""
        target = values.new_zeros(self.starts.numel() - 1, self.longest, *values.shape[1:])
        return target.index_put((self.sequence_ids, self.slots), values)

    def slices(self) -> list[slice]:
        """Each sequence's tokens."""
        return [slice(a, b) for a, b in pairwise(self.starts.tolist())]
