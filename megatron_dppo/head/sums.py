"""A Top-K set over shards by its sums instead of its slots, in two collectives.

They exchange 28 bytes per row for any K, 44 with the sums of predictive masks, 48 with their exact tail.

A divergence of the Top-K family is a sum over slots, and each slot is an entry of one shard. So the shards gather

    m, t, s, y        (s = o + sum of exp(z) over the label and the ids of the shard, the others as in ``row_kernels``)

which gives the totals of the row, then each takes the sums over its own slots, and one SUM all-reduce adds them up with
``o``. It pays where K times the number of shards is large: the exchange of the slots takes 4 (4 + K) bytes a row from
every shard, in one collective.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dppo.head.row_plan import Rows
from megatron_dppo.head.rows import RowTotals
from megatron_dppo.types import LossOutput, Metric, SlotSums


def narrow(shard_statistics: Tensor, labels: Tensor, ids: Tensor, valid: Tensor) -> Tensor:
    """Reduce a shard's row statistics to the ``[n, 4]`` that it sends; ``labels`` and ``ids`` are global."""
    once = ~((ids == labels[:, None]) & valid).any(1, keepdim=True)  # a label that is an id too counts once
    # Column o leaves out the label and the ids; their exponentials are added to it. An entry of another shard is -inf
    # here, and adds 0.
    counted = torch.cat([once, valid], 1)
    total = shard_statistics[:, 2] + torch.where(counted, shard_statistics[:, 3 : 4 + ids.shape[1]].exp(), 0.0).sum(1)
    return torch.stack([shard_statistics[:, 0], shard_statistics[:, 1], total, shard_statistics[:, 3]], 1)


def merge_narrow(parts: Tensor, temperature: float) -> RowTotals:
    """Merge the shards' ``[ranks, n, 4]`` to the totals of the rows, without ids; a row of -inf gives NaN."""
    maxima, weighted, sums, at_label = parts.unbind(-1)
    maximum = maxima.amax(0)
    shift = (maxima - maximum) / temperature
    scale = shift.exp()
    # A shard of -inf only: its shift is -inf, and 0 times it must be 0.
    # t sums z exp(z) with z relative to the shard's maximum. Relative to the row's maximum, z becomes z + shift.
    moment = torch.where(scale == 0, 0.0, scale * (weighted + shift * sums)).sum(0)
    total = (scale * sums).sum(0)
    log_total = total.log()
    # One shard owns the label; the others have -inf.
    logprobs = (at_label + shift).amax(0) - log_total
    # Entropy: -E[log p] = log Z - E[z].
    return RowTotals(maximum, total, logprobs, log_total - moment / total, None, None)


def reduce_slots(
    shard_statistics: Tensor,
    owned: Tensor,
    rollout_logprobs: Tensor,
    totals: RowTotals,
    temperature: float,
    group: ProcessGroup,
    slot_sums: SlotSums,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return sums over all slots but the label's, log of the mass outside the set, and the sum of p^2 there.

    One all-reduce; ``([n, C], [n], [n])`` in the dtype of ``shard_statistics``, equal on all ranks; the last is None
    without column q. ``owned [n, K]`` are the valid slots whose entry is of this shard.
    """
    slots = 4 + owned.shape[1]
    shift = (shard_statistics[:, 0] - totals.maximum) / temperature
    # log p of this shard's ids: y_i is relative to the shard's maximum, ``shift`` brings it to that of the row.
    logprobs = shard_statistics[:, 4:slots] + (shift - totals.total.log())[:, None]
    sums = slot_sums(logprobs, rollout_logprobs, owned).to(shard_statistics.dtype)
    # Columns o and q are relative to the maximum of the shard. q sums squares, so its factor is squared.
    scale = shift.exp()[:, None]
    together = torch.cat([sums, shard_statistics[:, 2:3] * scale, shard_statistics[:, slots:] * scale.square()], 1)
    dist.all_reduce(together, group=group)
    sums, other, squares = together.tensor_split([sums.shape[1], sums.shape[1] + 1], dim=1)
    square = squares.squeeze(1) / totals.total.square() if squares.shape[1] else None
    return sums, other.squeeze(1).log() - totals.total.log(), square


def joined(outputs: list[LossOutput], rows: Rows) -> LossOutput:
    """Join the outputs of the chunks to that of all T rows."""

    def together(name: str) -> Tensor | None:
        parts = [getattr(output, name) for output in outputs]
        return None if any(part is None for part in parts) else rows.spread(torch.cat(parts))

    first, *further = outputs
    metrics = dict(first.metrics)
    for output in further:
        metrics = {name: _add(metric, output.metrics[name]) for name, metric in metrics.items()}
    return LossOutput(
        loss_sum=torch.stack([output.loss_sum for output in outputs]).sum(),
        num_tokens=torch.stack([output.num_tokens for output in outputs]).sum(),
        keep_mask=rows.spread(torch.cat([output.keep_mask for output in outputs])),
        metrics=metrics,
        logprobs=together("logprobs"),
        entropy=together("entropy"),
        divergence=together("divergence"),
    )


def _add(a: Metric, b: Metric) -> Metric:
    if a.kind == "max":
        return Metric(torch.maximum(torch.as_tensor(a.numerator), torch.as_tensor(b.numerator)), kind="max")
    return Metric(a.numerator + b.numerator, a.denominator + b.denominator)
