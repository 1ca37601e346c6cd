"""Core attention with torch's scaled_dot_product_attention, for packed rows (Megatron's THD layout).

Reason: Megatron's ``DotProductAttention`` supports no packed sequences; only Transformer Engine's attention does.
Affected: Megatron Core 0.16.1 to 0.19.2 without Transformer Engine.
Delete when: Megatron has attention for packed sequences without Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from megatron_dppo_megatron_cpu.context import ContextShard
from megatron_dppo_megatron_cpu.layers import weight_device

MAX_PADDING_RATIO = 1.25
"""Largest ratio of padded slots to tokens in one bucket."""
FREE_SLOTS = 1024
"""Padding slots that cost less than one more attention call."""


@dataclass(frozen=True)
class PaddedLayout:
    """Indices of a bucket's N tokens in the packed row, and in the padded layout ``[num_sequences, longest]``."""

    tokens: Tensor
    """Index in the row [N]."""
    sequences: Tensor
    """Sequence in the padded layout [N]."""
    slots: Tensor
    """Slot in the padded layout [N]."""
    count: int
    """Number of sequences."""
    longest: int
    """Slots of one sequence."""

    @classmethod
    def from_spans(cls, spans: Sequence[tuple[int, int]], device: torch.device) -> PaddedLayout:
        """Create the layout of sequences at these ``(start, end)`` positions of a row."""
        lengths = torch.tensor([end - start for start, end in spans])
        slots = torch.cat([torch.arange(end - start) for start, end in spans])
        sequences = torch.repeat_interleave(torch.arange(len(spans)), lengths)
        tokens = torch.tensor([start for start, _ in spans])[sequences] + slots
        tokens, sequences, slots = (x.to(device, non_blocking=True) for x in (tokens, sequences, slots))
        return cls(tokens, sequences, slots, len(spans), int(lengths.max()))

    def pad(self, values: Tensor) -> Tensor:
        """Convert ``[T, ...]`` of the row to ``[num_sequences, longest, ...]``, zeros on the right."""
        target = values.new_zeros(self.count, self.longest, *values.shape[1:])
        return target.index_put((self.sequences, self.slots), values[self.tokens])

    def unpad(self, padded: Tensor) -> Tensor:
        """Convert ``[num_sequences, longest, ...]`` to ``[N, ...]`` of the bucket's tokens."""
        return padded[self.sequences, self.slots]


@dataclass(frozen=True)
class LengthBucket:
    """Sequences of similar length, computed in one attention call."""

    queries: PaddedLayout
    """Layout of the queries: this context-parallel rank's tokens."""
    keys: PaddedLayout
    """Layout of the keys: all tokens of the row."""
    positions: Tensor | None
    """Positions of the queries in their sequence ``[num_sequences, longest]``. None means the slot is the position."""


def build_buckets(starts: Sequence[int], positions: Tensor, shard: ContextShard | None) -> list[LengthBucket]:
    """Return buckets that hold every sequence once.

    Args:
        starts: Start of each sequence in the row, and T at the end ``[num_sequences + 1]``.
        positions: Position of every token in its sequence [T].
        shard: Tokens of this context-parallel rank: the same share of each sequence, in order. None means all.
    """
    spans = list(pairwise(starts))
    size = 1 if shard is None else shard.group.size()
    result = []
    for group in group_by_length([end - start for start, end in spans]):
        keys = PaddedLayout.from_spans([spans[i] for i in group], positions.device)
        if shard is None:
            result.append(LengthBucket(keys, keys, None))
            continue
        # A rank has the same share of each sequence, so its part of one begins at ``start / size`` of its tokens.
        local = PaddedLayout.from_spans([(spans[i][0] // size, spans[i][1] // size) for i in group], positions.device)
        # An empty slot gets position 0 and attends to one key: its softmax is defined, and its result is dropped.
        result.append(LengthBucket(local, keys, local.pad(shard.split(positions))))
    return result


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Return the indices of sequences in groups of similar length, the longest first.

    Example:
        >>> group_by_length([4000, 900, 4000, 800])
        [[0, 2], [1, 3]]
    """
    groups: list[list[int]] = []
    tokens = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        # Lengths fall, so a group is padded to the length of its first sequence.
        slots = (len(groups[-1]) + 1) * lengths[groups[-1][0]] if groups else 0
        filled = tokens + lengths[i]
        if groups and slots <= max(MAX_PADDING_RATIO * filled, filled + FREE_SLOTS):
            groups[-1].append(i)
            tokens = filled
        else:
            groups.append([i])
            tokens = lengths[i]
    return groups


MASK_SIZE = 2**25
"""Elements of a mask (queries times keys) beyond which a bucket is computed in blocks.

Two ranks with a row of 32,768 tokens would keep masks of 512 MiB in each layer, and torch makes numbers of them.
"""
_CPU_FP32_LENGTH = 256
"""Length in tokens up to which bf16 attention on a CPU is computed in fp32.

The backward pass of torch 2.13 in bf16 takes 2 times as long at 64 tokens, as long at 256, and two thirds of the time
at 2,048 (AMD EPYC with AVX-512 BF16).
"""


class PackedBatch(Protocol):
    """Sequences of a packed row of T tokens."""

    @property
    def cu_seqlens(self) -> Tensor:
        """Start of each sequence, and T at the end. Int32, shape [num_sequences + 1]."""

    @property
    def max_seqlen(self) -> int:
        """Length of the longest sequence."""

    @property
    def position_ids(self) -> Tensor:
        """Position of each token in its sequence [T]."""


@dataclass
class PackedRow(PackedSeqParams):
    """Megatron's PackedSeqParams with the layout for attention, created once per row for all layers."""

    starts: tuple[int, ...] = ()
    """Start of each sequence, and T at the end ``[num_sequences + 1]``, on the host."""
    positions: Tensor | None = None
    """Position of every token in its sequence [T]."""
    shard: ContextShard | None = None
    """Tokens of this context-parallel rank. None means all."""
    noise: object = None
    """The caller's own, for its layers. It is passed here because a recomputed layer gets the same object again."""
    is_padding: Tensor | None = None
    """Padding among the tokens of this context-parallel rank. None means no padding."""

    @classmethod
    def from_batch(cls, batch: PackedBatch, starts: Sequence[int], shard: ContextShard | None = None) -> PackedRow:
        """Create the parameters of one packed micro-batch; ``starts`` is its ``cu_seqlens`` on the host."""
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
        """Sequences in buckets of similar length."""
        assert self.positions is not None
        return build_buckets(self.starts, self.positions, self.shard)

    @cached_property
    def host_cu_seqlens(self) -> Tensor:
        """``cu_seqlens_q`` in host memory, int32 ``[num_sequences + 1]``: reading it does not wait for the device."""
        return torch.tensor(self.starts, dtype=torch.int32)


class SDPACoreAttention(MegatronModule):
    """Causal attention with grouped queries over packed sequences.

    Each bucket of sequences is padded to ``[num_sequences, longest]`` for one batched call. Padding is on the right,
    where the causal mask hides it. A context-parallel rank gathers all keys and values, and computes its queries.

    Two options, by Megatron's own fields: a sliding window in some layers (``window_size``,
    ``window_attn_skip_freq``), and attention sinks (``softmax_type = "learnable"``). A sink is a score of each head
    that enters the softmax beside those of the keys, and takes its share of the attention to no value.

    Attributes:
        window: Number of visible keys before the query's own. None for full attention.
        softmax_offset: Sink of each local head ``[num_heads]``, as Transformer Engine names it. None without sinks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ValueError(f"Expected attention_dropout = 0 for SDPACoreAttention, got {dropout}.")
        self.softmax_scale = softmax_scale
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] if has_window else None
        self.softmax_offset = _sinks(config) if config.softmax_type == "learnable" else None

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
        """Compute attention.

        Shapes are ``[T, num_heads, head_dim]`` of queries, ``[T, num_query_groups, head_dim]`` of keys, ``[T,
        num_query_groups, v_head_dim]`` of values, and ``[T, num_heads * v_head_dim]`` of the result.
        ``packed_seq_params`` is the row's ``PackedRow``; masks and biases are ignored.
        """
        if not isinstance(packed_seq_params, PackedRow):
            raise ValueError("Expected packed rows. Fix: pass packed_seq_params=PackedRow.from_batch(batch, starts).")
        shard = packed_seq_params.shard
        # Queries stay split over the context-parallel ranks; each rank needs all keys and values.
        if shard is not None:
            key, value = shard.gather_for_partial(key), shard.gather_for_partial(value)
        outputs = []
        for bucket in packed_seq_params.buckets:
            parts = bucket.queries.pad(query), bucket.keys.pad(key), bucket.keys.pad(value)
            outputs.append(bucket.queries.unpad(self.attend_bucket(*parts, self._mask_positions(bucket))))
        tokens = torch.cat([bucket.queries.tokens for bucket in packed_seq_params.buckets])
        # Values may have another head size than queries and keys (MLA).
        empty = value.new_empty(*query.shape[:-1], value.shape[-1])
        return empty.index_copy(0, tokens, torch.cat(outputs)).flatten(1)

    def _mask_positions(self, bucket: LengthBucket) -> Tensor | None:
        """Return the positions ``[B or 1, q]`` of queries that need a mask. None means causal alone."""
        positions = bucket.positions
        if positions is None and (self.window is not None or self.softmax_offset is not None):
            return torch.arange(bucket.queries.longest, device=bucket.queries.slots.device)[None]
        return positions

    def attend_bucket(self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor | None) -> Tensor:
        """Attend within one bucket, block by block of the queries if one mask of all would be large.

        A block is computed again in the backward pass, so that no mask is kept for it.
        """
        if positions is None:
            return self._attend(query, key, value, None)
        size = max(1, MASK_SIZE // (len(positions) * key.shape[1]))
        if size >= positions.shape[1]:
            return self._attend_masked(query, key, value, positions)
        blocks = zip(query.split(size, 1), positions.split(size, 1), strict=True)
        outputs = [
            checkpoint(self._attend_masked, part, key, value, at, use_reentrant=False, preserve_rng_state=False)
            for part, at in blocks
        ]
        return torch.cat(outputs, 1)

    def _attend_masked(self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> Tensor:
        distance = positions[:, None, :, None] - torch.arange(key.shape[1], device=positions.device)
        is_visible = distance >= 0
        if self.window is not None:
            is_visible &= distance <= self.window
        return self._attend(query, key, value, is_visible)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attend from ``query [B, q, heads, d]`` to ``key, value [B, s, groups, *]``; return ``[B, q, heads, e]``."""
        dtype = query.dtype
        if query.device.type == "cpu" and dtype == torch.bfloat16 and key.shape[1] <= _CPU_FP32_LENGTH:
            query = query.float()
            key = key.float()
            value = value.float()
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        repeat = q.shape[1] // k.shape[1]
        # Grouped queries need less memory than copied keys. With a mask, CUDA's fast kernels do not support them.
        enable_gqa = repeat > 1 and mask is None
        if repeat > 1 and not enable_gqa:
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        scale = query.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        if self.softmax_offset is not None:
            assert mask is not None, "a mask always comes with sinks"
            q, k, v, mask = _add_sink(q, k, v, mask, self.softmax_offset.to(q.dtype) / scale)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=enable_gqa
        )
        return out.transpose(1, 2).to(dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the sharded state: the sinks, split over tensor parallelism, as in Megatron's own attention."""
        state = {} if self.softmax_offset is None else {"softmax_offset": self.softmax_offset}
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets)


def _sinks(config: Any) -> Parameter:
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    sinks = Parameter(torch.zeros(heads, dtype=config.params_dtype, device=weight_device(config)))
    # Marks the sinks as split, so that the gradient norm counts every part once.
    set_tensor_model_parallel_attributes(sinks, True, 0, 1)
    return sinks


def _add_sink(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scores: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Add a key that every query sees, whose score is that of the head's sink, and whose value is zero.

    Queries get one column more, with the sink's score. It meets 1 in the added key and 0 in all others. So the kernels
    of full attention compute sinks too. Shapes: queries ``[B, heads, q, d]``, keys ``[B, heads, s, d]``, values ``[B,
    heads, s, e]``, mask ``[B or 1, 1, q, s]``, sinks before they are scaled ``[heads]``.
    """
    column = scores[None, :, None, None].expand(*query.shape[:-1], 1)
    sink = F.pad(torch.zeros_like(key[:, :, :1]), (0, 1), value=1.0)
    return (
        torch.cat([query, column], -1),
        torch.cat([F.pad(key, (0, 1)), sink], 2),
        F.pad(value, (0, 0, 0, 1)),
        F.pad(mask, (0, 1), value=True),
    )
