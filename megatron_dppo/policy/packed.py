"""One rank's part of a batch as packed micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.data.packing import RowShape, fill_bins, pack, split_evenly
from megatron_dppo.losses import BatchTotals
from megatron_dppo.types import MicroBatches, TrainingSample


@dataclass(frozen=True, kw_only=True)
class Packed:
    """One rank's part of a batch, ready for the schedule."""

    bins: list[list[int]]
    """for each micro-batch, the indices of its samples in the order of the row"""
    batches: MicroBatches
    totals: BatchTotals
    """of all ranks"""


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
        together = of_all_ranks([len(dealt), sum(per_sample), sum(n > 0 for n in per_sample)], self._dp_group)
        if bins is None:
            bins = split_evenly(dealt, -(-int(together[:, 0].max()) // self._multiple) * self._multiple)
        if self._equal_rows:
            longest = max(sum(shape.padded(samples[i].num_tokens) for i in part) for part in bins)
            longest = int(of_all_ranks([longest], self._dp_group).max())
            shape = replace(shape, row_multiple=-(-longest // shape.row_multiple) * shape.row_multiple)
        tokens, sequences = together[:, 1:].sum(0).tolist()
        return Packed(
            bins=bins,
            batches=MicroBatches(len(bins), lambda i: pack([samples[j] for j in bins[i]], shape, samples[0])),
            totals=BatchTotals(num_tokens=tokens, num_sequences=sequences),
        )


def of_all_ranks(values: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """``[ranks, len(values)]``"""
    mine = torch.tensor(values)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    return torch.stack(every)
