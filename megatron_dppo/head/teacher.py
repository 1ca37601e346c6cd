"""A teacher in the fused head: the divergence from it over the whole vocabulary, in the chunks of the policy's loss.

The teacher's hidden states go through its own output layer chunk by chunk, beside the student's. Its two totals of a
row travel in the gather of the student's statistics; one all-reduce of two numbers a row adds up both KLs, and the
gradient of the one in the loss takes the place of the teacher's logits.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.head.row_plan import RowChunk, Rows
from megatron_dppo.head.rows import RowTotals, VocabShard
from megatron_dppo.types import Divergence, LossOutput, Metric, TokenTargets

_LOG_ZERO = -1e4
"""Finite stand-in for log 0. Its exp is 0, so that 0 log 0 gives 0 without a branch."""
_BLOCK_BYTES = 1 << 20
"""Size of a block of rows on the CPU: a few blocks fit the cache of a core."""
_CUDA_BLOCK_BYTES = 1 << 26
COLUMN = {"reverse_kl": 0, "forward_kl": 1}
"""Column of each KL in ``shard_kls``."""


class Side(NamedTuple):
    """One of the two distributions on a shard, by row."""

    logits: Tensor
    """[n, W]"""
    maximum: Tensor
    """[n] the largest logit of the whole row, before the temperature"""
    log_total: Tensor
    """[n] log of the sum of exp((logit - maximum) / temperature) over the whole row"""


def shard_totals(logits: Tensor, shard_size: int, temperature: float) -> Tensor:
    """Return the maximum m of each row of ``logits [n, W]`` and the sum of exp((logit - m) / temperature), [n, 2].

    Only the first ``shard_size`` columns count. A shard without entries has -inf and 0.
    """
    totals = logits.new_zeros(len(logits), 2)
    if not shard_size or not len(logits):
        totals[:, 0] = -torch.inf
        return totals
    for block, out in _blocks(shard_size, logits[:, :shard_size], totals):
        out[:, 0] = block.amax(1)
        # The maximum of a row of -inf must be finite, or its exponentials would be NaN.
        top = out[:, :1].clamp(min=torch.finfo(block.dtype).min)
        out[:, 1] = ((block - top) / temperature).exp_().sum(1)
    return totals


def merge_totals(parts: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Merge the shards' ``[ranks, n, 2]`` to maximum and log of the total of the whole rows, ``[n]`` each."""
    maximum = parts[..., 0].amax(0)
    return maximum, (((parts[..., 0] - maximum) / temperature).exp() * parts[..., 1]).sum(0).log()


def shard_kls(student: Side, teacher: Side, shard_size: int, temperature: float) -> Tensor:
    """Return this shard's part of both KLs, ``[n, 2]``; the teacher's logits become its log-probabilities."""
    kls = student.maximum.new_zeros(len(student.maximum), len(COLUMN))
    if not shard_size or not len(kls):
        return kls
    columns = (kls, student.maximum, student.log_total, teacher.maximum, teacher.log_total)
    for z, u, out, top_p, total_p, top_q, total_q in _blocks(
        shard_size, student.logits[:, :shard_size], teacher.logits[:, :shard_size], *columns
    ):
        log_p = _log_probabilities(z, top_p, total_p, temperature)
        # In place: the gradient needs the teacher's log-probabilities again, and nothing needs its logits.
        log_q = u.copy_(_log_probabilities(u, top_q, total_q, temperature))
        log_ratio = log_p - log_q
        out[:, 0] = log_p.exp_().mul_(log_ratio).sum(1)
        out[:, 1] = -log_q.exp().mul_(log_ratio).sum(1)
    return kls


def gradient_(
    student: Side, log_q: Tensor, shard_size: int, kls: Tensor, weights: Tensor, temperature: float, name: str
) -> Tensor:
    """Return the gradient of the student's logits, ``[n, W]``, written over the teacher's log-probabilities.

    In the logits z of p, at temperature 1: d KL(p || q) / dz = p (log p - log q - KL(p || q)), and
    d KL(q || p) / dz = p - q. ``log_q`` is what ``shard_kls`` left of the teacher's logits, ``kls [n, 2]`` those of all
    shards, ``weights [n]`` the derivative of the loss in the KL of each row.
    """
    log_q[:, shard_size:] = 0.0
    if not shard_size or not len(log_q):
        return log_q
    rows = (student.maximum, student.log_total, kls[:, COLUMN["reverse_kl"]], weights / temperature)
    for z, target, maximum, total, reverse_kl, weight in _blocks(
        shard_size, student.logits[:, :shard_size], log_q[:, :shard_size], *rows
    ):
        log_p = _log_probabilities(z, maximum, total, temperature)
        if name == "reverse_kl":
            slope = (log_p - target).sub_(reverse_kl[:, None]).mul_(log_p.exp_())
        else:
            slope = log_p.exp_().sub_(target.exp_())
        target.copy_(slope.mul_(weight[:, None]))
    return log_q


def add_(out: Tensor, gradient: Tensor) -> Tensor:
    """Add ``gradient [n, W]``, which is overwritten, to ``out [n, W]`` of the same or a narrower dtype; round once."""
    if len(out):
        for target, block in _blocks(out.shape[1], out, gradient):
            target.copy_(block.add_(target))
    return out


def _log_probabilities(logits: Tensor, maximum: Tensor, log_total: Tensor, temperature: float) -> Tensor:
    z = (logits - maximum[:, None]).mul_(1 / temperature)
    return z.sub_(log_total[:, None]).clamp_(min=_LOG_ZERO)


def _blocks(shard_size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Iterate over the same few rows of each tensor."""
    size = _CUDA_BLOCK_BYTES if tensors[0].is_cuda else _BLOCK_BYTES
    step = max(1, size // (shard_size * tensors[0].element_size()))
    return zip(*(tensor.split(step) for tensor in tensors), strict=True)


COLUMNS = 2
"""Numbers of a row that the teacher's shard adds to what is gathered."""


class TeacherTargets(NamedTuple):
    """A teacher's side of the loss of T rows."""

    hidden: Tensor
    """[T, H] its last hidden states; H is its own"""
    weight: Tensor
    """[V_local, H] its shard of the output layer: of the same ids as the student's"""
    divergence: Divergence


@dataclass(frozen=True)
class DistillationTerm:
    """Distillation term of a chunk."""

    loss_sum: Tensor
    """Sum over rows including the coefficient, a scalar without gradient."""
    metrics: dict[str, Metric]
    gradient: Tensor | None
    """[n, W] of the student's logits"""


class Distillation:
    """Distillation from a teacher in one call of the head."""

    def __init__(
        self, teacher: TeacherTargets, student: VocabShard, rows: Rows, vocab_size: int, targets: TokenTargets
    ) -> None:
        hidden, weight, self._divergence = teacher
        self._head = VocabShard.of(hidden, weight, None, student.group, vocab_size, student.temperature)
        if len(hidden) != rows.length or len(weight) != len(student.weight) or self._head.dtype != student.dtype:
            raise ValueError(
                f"the teacher has {len(hidden)} rows and {len(weight)} entries of the vocabulary in "
                f"{self._head.dtype}, the student {rows.length} and {len(student.weight)} in {student.dtype}; they "
                "must be the same"
            )
        if rows.num_gradient != rows.count:
            raise ValueError("a divergence has a gradient in every row with loss; make the plan without advantages")
        if targets.sampling_mask is not None:
            raise ValueError(
                "a divergence from a teacher is over the whole vocabulary, but targets.sampling_mask is given"
            )
        self._hidden, self._rows = hidden, rows

    def new_logits(self, rows: int) -> Tensor:
        """Allocate memory for the teacher's logits of ``rows`` rows."""
        return self._head.new_logits(rows)

    def start(self, chunk: RowChunk, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """Return the teacher's logits ``[n, W]`` of a chunk, and the ``[n, COLUMNS]`` that are gathered."""
        logits = self._head.logits(self._rows.take(self._hidden, chunk.start, chunk.stop), buffer)
        return logits, shard_totals(logits, self._head.shard_size, self._head.temperature)

    def finish(
        self,
        logits: Tensor,
        totals: RowTotals,
        teacher_logits: Tensor,
        parts: Tensor,
        targets: TokenTargets,
        *,
        scale: Tensor | None,
        differentiates: bool,
    ) -> DistillationTerm:
        """Return the divergence of a chunk, whose ``teacher_logits [n, W]`` become the gradient."""
        head, divergence = self._head, self._divergence
        student = Side(logits, totals.maximum, totals.total.log())
        teacher = Side(teacher_logits, *merge_totals(parts, head.temperature))
        kls = shard_kls(student, teacher, head.shard_size, head.temperature)
        if head.group is not None:
            dist.all_reduce(kls, group=head.group)
        mask, weights = _row_weights(targets, divergence.coef, kls.dtype)
        terms = torch.where(mask, weights * kls[:, COLUMN[divergence.name]], 0.0)
        count = mask.sum()
        metrics = {
            f"teacher_{name}": Metric(torch.where(mask, kls[:, column], 0.0).sum(), count)
            for name, column in COLUMN.items()
        }
        metrics["distillation_loss"] = Metric(terms.sum(), count)
        gradient = None
        if differentiates:
            weights = weights if scale is None else weights * scale
            gradient = gradient_(
                student, teacher_logits, head.shard_size, kls, weights, head.temperature, divergence.name
            )
        return DistillationTerm(terms.sum(), metrics, gradient)


def add_distillation(output: LossOutput, loss_sum: Tensor, metrics: Mapping[str, Metric]) -> LossOutput:
    """Add a distillation term to an output: to the loss and to the reported loss."""
    merged = {**output.metrics, **metrics}
    if "loss" in output.metrics:
        loss = output.metrics["loss"]
        merged["loss"] = Metric(loss.numerator + loss_sum.detach(), loss.denominator)
    return replace(output, loss_sum=output.loss_sum + loss_sum, metrics=merged)


def _row_weights(targets: TokenTargets, coef: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the mask of rows that count, as in ``losses.policy_loss``, and the weight of each row, 0 elsewhere."""
    mask = targets.loss_mask
    if targets.rollout_logprobs is not None:
        mask = mask & targets.rollout_logprobs.isfinite()
    weights = mask.to(dtype) * coef
    return mask, weights if targets.token_weights is None else weights * targets.token_weights.to(dtype)
