"""Packed micro-batches of one rank's part of a batch, their costs, and what updates saw of each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.config.layout import ModelShape
from megatron_dppo.data.training_samples import RowShape, fill_bins, pack, split_evenly
from megatron_dppo.hf.families import get_family
from megatron_dppo.hf.folder import model_shape
from megatron_dppo.losses import BatchTotals
from megatron_dppo.types import MicroBatches, TrainingSample

if TYPE_CHECKING:
    from megatron_dppo.mcore.row import RowRecord


@dataclass(frozen=True, kw_only=True)
class Packed:
    """One rank's part of a batch, ready for the schedule."""

    bins: list[list[int]]
    """for each micro-batch, the indices of its samples in the order of the row"""
    batches: MicroBatches
    totals: BatchTotals
    """of all ranks"""

    def positions(self, samples: Sequence[TrainingSample]) -> list[tuple[int, slice, int]]:
        """Return of each sample its index, its part of a packed row, and the number of that row."""
        return [
            (i, slice(start, start + samples[i].num_tokens), number)
            for number, (part, batch) in enumerate(zip(self.bins, self.batches, strict=True))
            for i, start in zip(part, batch.cu_seqlens.tolist(), strict=False)  # a padding sequence may follow
        ]


class Packer:
    """Packs what a layout asks for.

    Args:
        shape: what rows have to be padded to.
        multiple: of the number of micro-batches.
        dp_group: ranks with different samples.
        equal_rows: the rows of one micro-batch are equally long on all ranks.
    """

    def __init__(self, shape: RowShape, multiple: int, dp_group: dist.ProcessGroup | None, *, equal_rows: bool) -> None:
        self._shape, self._multiple, self._dp_group, self._equal_rows = shape, multiple, dp_group, equal_rows

    def pack(self, samples: Sequence[TrainingSample], budget: int, bins: list[list[int]] | None = None) -> Packed:
        """This rank's samples as packed micro-batches, equally many on every rank; one or two collectives.

        Args:
            samples: this data-parallel rank's, at least one.
            budget: tokens of one micro-batch.
            bins: the samples of each micro-batch, equally many on every rank; None = found here.
        """
        shape = self._shape
        dealt = fill_bins(samples, budget, shape) if bins is None else bins
        per_sample = [int(sample.loss_mask.sum()) for sample in samples]
        together = all_gather_integers([len(dealt), sum(per_sample), sum(n > 0 for n in per_sample)], self._dp_group)
        if bins is None:
            bins = split_evenly(dealt, -(-int(together[:, 0].max()) // self._multiple) * self._multiple)
        if self._equal_rows:
            longest = max(sum(shape.padded(samples[i].num_tokens) for i in part) for part in bins)
            longest = int(all_gather_integers([longest], self._dp_group).max())
            shape = replace(shape, row_multiple=-(-longest // shape.row_multiple) * shape.row_multiple)
        tokens, sequences = together[:, 1:].sum(0).tolist()
        return Packed(
            bins=bins,
            batches=MicroBatches(len(bins), lambda i: pack([samples[j] for j in bins[i]], shape, samples[0])),
            totals=BatchTotals(num_tokens=tokens, num_sequences=sequences),
        )


def all_gather_integers(values: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """``[ranks, len(values)]``"""
    mine = torch.tensor(values)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    return torch.stack(every)


def attention_length(hf_config: Any) -> float:
    """The length at which a sequence's attention (causal) takes as many FLOPs as all matrices; 15.5k for Qwen3-30B-A3B.

    A weight is one multiplication a token, a pair of positions two for each head and dimension; backward doubles both.
    """
    shape = model_shape(hf_config)
    own, hidden, layers = get_family(hf_config).fields(hf_config, shape), shape.hidden_size, shape.num_layers
    of_layer, of_pair = _latent(own, shape) if shape.has_latent_attention else _grouped(own, shape)
    num_dense = layers if shape.num_experts is None else len(shape.dense_layers)
    weights = layers * of_layer + num_dense * 3 * hidden * hf_config.intermediate_size + hidden * shape.vocab_size
    if shape.num_experts is not None:
        experts = own["moe_router_topk"] * own["moe_ffn_hidden_size"]
        shared = own.get("moe_shared_expert_intermediate_size", 0)
        weights += (layers - num_dense) * hidden * (3 * (experts + shared) + shape.num_experts)
    return weights / (layers * of_pair / 2)


def _grouped(own: Mapping[str, Any], shape: ModelShape) -> tuple[int, int]:
    """The weights of a layer's attention, and the multiplications of a pair of positions."""
    heads, dim = shape.num_attention_heads, own["kv_channels"]
    return 2 * shape.hidden_size * dim * (heads + shape.num_query_groups), 2 * heads * dim


def _latent(own: Mapping[str, Any], shape: ModelShape) -> tuple[int, int]:
    """The same of latent attention, whose keys and values are made of latents."""
    heads, hidden, keys, values = shape.num_attention_heads, shape.hidden_size, own["kv_lora_rank"], own["v_head_dim"]
    rotated, plain, queries = own["qk_pos_emb_head_dim"], own["qk_head_dim"], own["q_lora_rank"]
    of_queries = heads * (plain + rotated)
    weights = hidden * of_queries if queries is None else queries * (hidden + of_queries)
    weights += hidden * (keys + rotated) + keys * heads * (plain + values) + heads * values * hidden
    return weights, of_queries + heads * values


class SampleRecord(NamedTuple):
    """One sample as the last update that trained on it saw it; T tokens, aligned to the labels, on the CPU."""

    update: int
    """of the step, from 0"""
    logprobs: Tensor
    """[T] fp32 log pi, before that update; no meaning outside the loss mask"""
    keep: Tensor
    """[T] bool, True = the token had a gradient"""


class TokenRecorder:
    """Gathers the tokens of one step's updates on this rank.

    Attributes:
        samples: by ``TrainingSample.number``; empty but on the last pipeline stage.
    """

    def __init__(self) -> None:
        self.samples: dict[int, SampleRecord] = {}
        self._updates = 0

    def add(
        self, samples: Sequence[TrainingSample], packed: Packed, rows: Sequence[RowRecord], shape: RowShape
    ) -> None:
        """One update: this rank's samples, how they were packed, and what the loss saw of each row."""
        for part, row in zip(packed.bins, rows, strict=False):  # no rows but on the last stage
            starts = accumulate([0, *(shape.padded(samples[i].num_tokens) for i in part)])
            for i, start in zip(part, starts, strict=False):
                own = slice(start, start + samples[i].num_tokens)
                seen = SampleRecord(self._updates, row.logprobs[own].clone(), row.keep[own].clone())
                self.samples[samples[i].number] = seen
        self._updates += 1
