"""One packed micro-batch on its way through Megatron's schedule, and the record of its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dppo.head.row_plan import RowPlan
from megatron_dppo.head.teacher import TeacherTargets
from megatron_dppo.mcore.layer_noise import NoiseFactory
from megatron_dppo.types import LossOutput, MicroBatch, TokenTargets
from megatron_dppo_megatron_cpu.attention import PackedRow
from megatron_dppo_megatron_cpu.context import ContextShard


@dataclass(frozen=True)
class MicroBatchRow:
    """One packed micro-batch on the device, with the tokens that this context-parallel rank computes."""

    batch: MicroBatch
    """The micro-batch with all T tokens of the row."""
    targets: TokenTargets
    """Labels and loss columns of this rank's tokens."""
    plan: RowPlan
    """This rank's tokens that have a loss, and those of them that have a gradient."""
    packing: PackedRow
    """Megatron's packed-sequence parameters, for attention."""
    shard: ContextShard | None
    """This rank's tokens of the row. None without context parallelism."""
    teacher: TeacherTargets | None = None
    """Teacher's hidden states of this rank's tokens, in host memory. None disables distillation."""

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
        """Move a micro-batch to the device and select this rank's tokens.

        Args:
            batch: Micro-batch in host memory.
            cp_group: Context-parallel ranks. None without context parallelism.
            device: Device of the model.
            skips_zero_advantage: Tokens with advantage 0 have no gradient.
            noise: Creates the noise of the layers' inputs. None disables it.
        """
        # Everything that reads tensor values happens on the host tensors: on the device it would wait for the GPU.
        host_shard = None if cp_group is None else ContextShard.of(batch.cu_seqlens, cp_group)
        if host_shard is None:
            mask = batch.loss_mask
            advantages = batch.advantages
        else:
            mask = host_shard.split(batch.loss_mask)
            advantages = host_shard.split(batch.advantages)
        plan = RowPlan.of(mask, advantages if skips_zero_advantage else None, device)
        starts = batch.cu_seqlens.tolist()

        device_batch = batch.to(device)
        shard = None if host_shard is None else host_shard.to(device)
        packing = PackedRow.from_batch(device_batch, starts, shard)
        is_padding = device_batch.is_padding
        packing.is_padding = is_padding if shard is None or is_padding is None else shard.split(is_padding)
        # Megatron hands this object on to every layer; the noise's hook on a layer finds it there.
        packing.noise = None if noise is None else noise(batch, shard)
        if host_shard is None or shard is None:
            return cls(device_batch, device_batch, plan, packing, None)
        # Tensors are selected on the device, sampling masks by the indices on the host.
        return cls(device_batch, device_batch.select(shard.index, host_shard.index), plan, packing, shard)

    def split(self, values: Tensor) -> Tensor:
        """Return this rank's tokens of ``[T, ...]`` values of the row."""
        return values if self.shard is None else self.shard.split(values)


class RowRecord(NamedTuple):
    """Tokens of a row as the loss computed them. Values outside the loss mask are undefined."""

    logprobs: Tensor
    """Log-probabilities [T] of the labels, fp32."""
    keep: Tensor
    """Boolean mask [T]. True marks a token that had a gradient."""
    entropy: Tensor
    """Entropy [T] of the policy in nats, fp32. NaN if the loss does not return it."""
    divergence: Tensor
    """Divergence [T] of policy and rollout policy, as the loss measures it, fp32. NaN if the loss does not return
    it."""

    def cpu(self) -> RowRecord:
        """Return the record in host memory; a copy from a GPU waits for everything that computes it."""
        return RowRecord(*(column.cpu() for column in self))


@torch.no_grad()
def record_row(output: LossOutput, row: MicroBatchRow) -> RowRecord:
    """Return the record of the whole row on every context-parallel rank; a collective of them.

    Raises:
        ValueError: The loss returns no log-probabilities, as the supervised one.
    """
    if output.logprobs is None:
        raise ValueError("The tokens of this loss cannot be recorded: it returns no LossOutput.logprobs.")
    unknown = torch.full_like(output.logprobs, torch.nan)
    entropy = unknown if output.entropy is None else output.entropy
    divergence = unknown if output.divergence is None else output.divergence
    # As floats in one tensor, so that one gather carries all of them.
    columns = torch.stack([column.float() for column in (output.logprobs, output.keep_mask, entropy, divergence)], 1)
    # A loss of whole sequences covers the whole row on every rank already.
    if row.shard is not None and len(columns) < row.batch.tokens.numel():
        columns = row.shard.gather(columns)
    logprobs, keep, entropy, divergence = columns.T.contiguous()
    return RowRecord(logprobs, keep > 0, entropy, divergence)
