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

from megatron_dppo.types import MicroBatch


@dataclass
class PackedRow(PackedSeqParams):
    """Megatron's PackedSeqParams with the index of every token, so that attention needs no host sync."""

    sequence_ids: Tensor | None = None
    """[T] which sequence a token belongs to"""
    positions: Tensor | None = None
    """[T] its position inside that sequence"""

    @classmethod
    def of(cls, batch: MicroBatch) -> PackedRow:
        """The parameters of one packed micro-batch."""
        return cls(
            qkv_format="thd",
            cu_seqlens_q=batch.cu_seqlens,
            cu_seqlens_kv=batch.cu_seqlens,
            max_seqlen_q=batch.max_seqlen,
            max_seqlen_kv=batch.max_seqlen,
            sequence_ids=batch.sequence_ids,
            positions=batch.position_ids,
        )


class SDPACoreAttention(MegatronModule):
    """Causal attention with grouped queries over packed sequences.

    The packed row is laid out as ``[sequences, longest]`` for one batched call; padding sits on the right, where the
    causal mask hides it. A pack whose padded area would be more than ``_MAX_PADDING`` times its tokens is computed
    sequence by sequence instead.
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
        if dropout or config.context_parallel_size > 1:
            raise ValueError(
                f"SDPACoreAttention has no dropout and no context parallelism, got attention_dropout={dropout}, "
                f"context_parallel_size={config.context_parallel_size}"
            )
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
        assert packed_seq_params.sequence_ids is not None and packed_seq_params.positions is not None
        starts, longest = packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q
        sequences = starts.numel() - 1
        if sequences * longest <= self._MAX_PADDING * query.shape[0]:
            index = packed_seq_params.sequence_ids, packed_seq_params.positions
            out = self._batched(query, key, value, index, (sequences, longest))
        else:
            bounds = starts.tolist()
            rows = [slice(a, b) for a, b in pairwise(bounds)]
            out = torch.cat([self._attend(query[r][None], key[r][None], value[r][None])[0] for r in rows])
        return out.flatten(1)

    def _batched(
        self, query: Tensor, key: Tensor, value: Tensor, index: tuple[Tensor, Tensor], shape: tuple[int, int]
    ) -> Tensor:
        padded = []
        for x in (query, key, value):
            target = x.new_zeros(*shape, *x.shape[1:])
            padded.append(target.index_put(index, x))
        return self._attend(*padded)[index]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """``[batch, s, heads, d]`` to the same shape."""
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        repeat = q.shape[1] // k.shape[1]
        if repeat > 1:
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale).transpose(1, 2)
