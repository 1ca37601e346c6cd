"""Packed micro-batches of one rank, their attention cost, and the recorded tokens of an update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.config.layout import ModelShape
from megatron_dppo.data.training_samples import RowShape, fill_bins, group_segments, pack, split_evenly
from megatron_dppo.hf.families import get_family
from megatron_dppo.hf.folder import model_shape
from megatron_dppo.losses import BatchTotals
from megatron_dppo.parallel.objects import all_gather
from megatron_dppo.types import MicroBatches, TrainingSample

if TYPE_CHECKING:
    from megatron_dppo.mcore.row import RowRecord


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Packed micro-batches of one rank, ready for Megatron's schedule."""

    bins: list[list[int]]
    """Sample indices of each micro-batch, in the order of the packed row."""
    batches: MicroBatches
    totals: BatchTotals
    """Token and sequence counts over all data-parallel ranks."""
    shape: RowShape = field(default_factory=RowShape)

    def positions(self, samples: Sequence[TrainingSample]) -> list[tuple[int, slice, int]]:
        """Return ``(sample index, tokens in its packed row, micro-batch index)`` for each sample.

        It follows from the lengths: reading ``cu_seqlens`` would pack every micro-batch once more.
        """
        result = []
        for batch_index, indices in enumerate(self.bins):
            start = 0
            for i in indices:
                result.append((i, slice(start, start + samples[i].num_tokens), batch_index))
                start += self.shape.padded(samples[i].num_tokens)
        return result


class Packer:
    """Packs samples into micro-batches that fit the layout.

    Their number is a multiple of ``multiple``. ``equal_rows`` pads rows to one length on all data-parallel ranks.
    """

    def __init__(self, shape: RowShape, multiple: int, dp_group: dist.ProcessGroup | None, *, equal_rows: bool) -> None:
        self._shape = shape
        self._multiple = multiple
        self._dp_group = dp_group
        self._equal_rows = equal_rows

    def pack(
        self,
        samples: Sequence[TrainingSample],
        budget: int,
        bins: list[list[int]] | None = None,
        *,
        joins_segments: bool = False,
    ) -> PackedBatch:
        """Pack this rank's samples into micro-batches of ``budget`` tokens, as many as on every other rank.

        A collective over the data-parallel group: one all-gather, a second one with ``equal_rows``. ``bins`` has the
        sample indices of each micro-batch, equally many on every rank; None packs by first-fit decreasing.
        ``joins_segments`` packs the segments of an episode into one row, as one sequence of the loss.
        """
        shape = self._shape
        units = packing_units(samples, shape, joins_segments=joins_segments)
        local_bins = fill_bins(units, budget) if bins is None else bins
        # An episode is one sequence, and its first segment stands for it.
        num_sequences = sum(sample.segment == 0 and sample.sequence_loss_tokens > 0 for sample in samples)
        local_counts = [len(local_bins), sum(sample.num_loss_tokens for sample in samples), num_sequences]
        # Micro-batches, tokens of the loss mask, and sequences that have such a token: one collective for all three.
        counts = all_gather_integers(local_counts, self._dp_group)

        # Every rank must run as many micro-batches: the schedule's collectives meet in each of them.
        if bins is None:
            num_batches = -(-int(counts[:, 0].max()) // self._multiple) * self._multiple
            unit_bins = split_evenly(local_bins, num_batches)
            bins = [[i for unit in unit_bin for i in units[unit].indices] for unit_bin in unit_bins]
        if self._equal_rows:
            longest = max(sum(shape.padded(samples[i].num_tokens) for i in indices) for indices in bins)
            longest = int(all_gather_integers([longest], self._dp_group).max())
            # A row is padded up to a multiple. With the longest length as the multiple, all rows get this length.
            shape = replace(shape, row_multiple=-(-longest // shape.row_multiple) * shape.row_multiple)

        num_tokens, num_sequences = counts[:, 1:].sum(0).tolist()
        return PackedBatch(
            bins=bins,
            batches=MicroBatches(
                len(bins),
                lambda i: pack([samples[j] for j in bins[i]], shape, samples[0], joins_segments=joins_segments),
            ),
            totals=BatchTotals(num_tokens=num_tokens, num_sequences=num_sequences),
            shape=shape,
        )


class PackingUnit(NamedTuple):
    """Samples that are packed into the same row."""

    indices: list[int]
    num_tokens: int
    """Padded length of all samples."""


def packing_units(samples: Sequence[TrainingSample], shape: RowShape, *, joins_segments: bool) -> list[PackingUnit]:
    """Return each episode as a unit if ``joins_segments``, else each sample."""
    groups = group_segments(samples) if joins_segments else [[i] for i in range(len(samples))]
    return [PackingUnit(indices, sum(shape.padded(samples[i].num_tokens) for i in indices)) for indices in groups]


def all_gather_integers(values: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """Return the values of every rank of the group, ``[num_ranks, len(values)]``; a collective."""
    return torch.stack(all_gather(torch.tensor(values), group))


def attention_length(hf_config: Any) -> float:
    """Return the sequence length at which causal attention takes as many FLOPs as all weight matrices together.

    Sample balancing weighs the quadratic part of a sequence's cost with it; it is 15.5k tokens for Qwen3-30B-A3B.
    Counted are multiplications of the forward pass: one for each weight and token; two for each head, dimension and
    pair of positions (scores and weighted values). In a layer with a sliding window each token meets ``sliding_window``
    keys whatever the length, a cost of the token like that of its weights: a model with windows in all layers has an
    infinite length.
    """
    shape = model_shape(hf_config)
    fields = get_family(hf_config).fields(hf_config, shape)
    hidden = shape.hidden_size
    layers = shape.num_layers
    attention_cost = _mla_cost if shape.has_latent_attention else _grouped_attention_cost
    layer_weights, pair_cost = attention_cost(fields, shape)
    num_linear = len(shape.linear_layers)
    num_windows = len(shape.window_layers)
    num_grouped = layers - num_linear

    # Weights that one token is multiplied by: attention, dense MLPs (gate, up, down), and the output layer.
    num_dense = layers if shape.num_experts is None else len(shape.dense_layers)
    dense_size = getattr(hf_config, "intermediate_size", None) or 0
    weights = num_grouped * layer_weights + num_dense * 3 * hidden * dense_size + hidden * shape.vocab_size
    weights += num_linear * _linear_attention_cost(shape)
    if shape.num_experts is not None:
        # Of an MoE layer only the top-k experts count, besides the shared expert and the router.
        expert_size = fields["moe_router_topk"] * fields["moe_ffn_hidden_size"]
        shared_size = fields.get("moe_shared_expert_intermediate_size", 0)
        weights += (layers - num_dense) * hidden * (3 * (expert_size + shared_size) + shape.num_experts)

    if num_windows:
        weights += num_windows * pair_cost * hf_config.sliding_window
    # The causal mask leaves half of the pairs: n tokens cost ``n * weights`` and ``num_full * pair_cost * n**2 / 2``.
    num_full = num_grouped - num_windows
    return weights / (num_full * pair_cost / 2) if num_full else math.inf


def _grouped_attention_cost(fields: Mapping[str, Any], shape: ModelShape) -> tuple[int, int]:
    """Return the weights of one attention layer, and its multiplications for a pair of positions."""
    heads = shape.num_attention_heads
    head_dim = fields["kv_channels"]
    # Query and output projections have ``heads`` heads, key and value projections have one for each group.
    weights = 2 * shape.hidden_size * head_dim * (heads + shape.num_query_groups)
    if fields.get("attention_output_gate"):
        # The query projection has a gate for each query.
        weights += shape.hidden_size * head_dim * heads
    return weights, 2 * heads * head_dim


def _linear_attention_cost(shape: ModelShape) -> int:
    """Return the multiplications of one layer of linear attention for a token: its weights, and those of its states.

    A token reads each state for its update and for its output, and changes it. The work within a chunk, which is a few
    percent of a layer, is left out.
    """
    linear = shape.linear
    if linear is None:
        return 0
    values = linear.num_value_heads * linear.value_head_dim
    return shape.hidden_size * (sum(linear.sections) + values) + 3 * values * linear.key_head_dim


def _mla_cost(fields: Mapping[str, Any], shape: ModelShape) -> tuple[int, int]:
    """Return the same for multi-latent attention (MLA), with Megatron's field names."""
    heads = shape.num_attention_heads
    hidden = shape.hidden_size
    kv_rank = fields["kv_lora_rank"]
    q_rank = fields["q_lora_rank"]
    v_dim = fields["v_head_dim"]
    rope_dim = fields["qk_pos_emb_head_dim"]
    nope_dim = fields["qk_head_dim"]
    # Scores use the part with and the part without rotary embedding; values have a size of their own.
    query_size = heads * (nope_dim + rope_dim)
    # The query: one projection, or one down to the rank and one up.
    weights = hidden * query_size if q_rank is None else q_rank * (hidden + query_size)
    # Down to the latent and the rotary key that all heads share, up to keys and values, and the output projection.
    weights += hidden * (kv_rank + rope_dim) + kv_rank * heads * (nope_dim + v_dim) + heads * v_dim * hidden
    return weights, query_size + heads * v_dim


class SampleRecord(NamedTuple):
    """Tokens of one sample as its last update computed them: T tokens, aligned to the labels, on the CPU."""

    update: int
    """Index of that update in the step, from 0."""
    policy_version: int
    """Version of the policy before that update."""
    logprobs: Tensor
    """Log-probabilities [T] of the policy before that update, fp32. Undefined outside the loss mask."""
    keep: Tensor
    """Boolean mask [T]. True marks a token that had a gradient. Undefined outside the loss mask."""


class TokenRecorder:
    """Records of one step's tokens on this rank by sample number and segment; none before the last stage."""

    def __init__(self) -> None:
        self.samples: dict[tuple[int, int], SampleRecord] = {}
        self._updates = 0

    def add(
        self, samples: Sequence[TrainingSample], packed: PackedBatch, rows: Sequence[RowRecord], policy_version: int
    ) -> None:
        """Record one update; ``rows`` are empty on all but the last pipeline stage."""
        for i, where, number in packed.positions(samples) if rows else ():
            row = rows[number]
            # Clones, so that a record does not keep the whole row in memory.
            logprobs, keep = row.logprobs[where].clone(), row.keep[where].clone()
            record = SampleRecord(self._updates, policy_version, logprobs, keep)
            self.samples[samples[i].number, samples[i].segment] = record
        self._updates += 1
