"""One micro-batch on its way through the schedule: the share of it that a rank computes, and its teacher's side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dppo.head.row_plan import RowPlan
from megatron_dppo.head.teacher import TeacherTargets
from megatron_dppo.mcore.compat.attention import PackedRow
from megatron_dppo.mcore.layer_noise import NoiseFactory
from megatron_dppo.parallel.context import ContextShard
from megatron_dppo.types import LossOutput, MicroBatch, TokenTargets


@dataclass(frozen=True)
class MicroBatchRow:
    """One micro-batch, and the share of it that this context-parallel rank computes."""

    batch: MicroBatch
    own: TokenTargets
    """the targets of this rank's tokens"""
    plan: RowPlan
    """which of those have a loss, and a gradient"""
    packing: PackedRow
    """for attention"""
    shard: ContextShard | None
    teacher: TeacherTargets | None = None
    """what a teacher says of the tokens whose hidden states are on this rank; in host memory, on the last stage only"""

    @classmethod
    def from_batch(
        cls,
        batch: MicroBatch,
        cp_group: ProcessGroup | None,
        device: torch.device,
        *,
        skips_zero_advantage: bool,
        noise: NoiseFactory | None = None,
    ) -> MicroBatchRow:
        """Move to ``device``; share and plan are found before that, on the host."""
        shard = None if cp_group is None else ContextShard.of(batch.cu_seqlens, cp_group)
        index = None if shard is None else shard.index
        mask, advantages = (x if shard is None else shard.split(x) for x in (batch.loss_mask, batch.advantages))
        plan = RowPlan.of(mask, advantages if skips_zero_advantage else None, device)
        starts, on_host, batch = batch.cu_seqlens.tolist(), batch, batch.to(device)
        shard = None if shard is None else shard.to(device)
        packing = PackedRow.from_batch(batch, starts, shard)
        packing.noise = None if noise is None else noise(on_host, shard)
        return cls(batch, batch if shard is None else batch.select(shard.index, index), plan, packing, shard)

    def split(self, values: Tensor) -> Tensor:
        """``[T, ...]`` of the row to what this rank computes."""
        return values if self.shard is None else self.shard.split(values)


class RowRecord(NamedTuple):
    """What a loss saw and decided of a row of T tokens; on the CPU. Neither means anything outside the loss mask."""

    logprobs: Tensor
    """[T] fp32 log pi"""
    keep: Tensor
    """[T] bool, True = the token had a gradient"""


@torch.no_grad()
def record_row(output: LossOutput, row: MicroBatchRow) -> RowRecord:
    """Of the whole row, on every context-parallel rank; a collective of them.

    Raises:
        ValueError: the loss does not hand on its log-probabilities, as that of a warm-up.
    """
    if output.logprobs is None:
        raise ValueError("this loss has no LossOutput.logprobs, so that its tokens cannot be recorded")
    both = torch.stack([output.logprobs.float(), output.keep_mask.float()], 1)
    if row.shard is not None and len(both) < row.batch.tokens.numel():  # else the loss was of the whole row
        both = row.shard.gather(both)
    both = both.cpu()
    return RowRecord(both[:, 0].clone(), both[:, 1] > 0)
