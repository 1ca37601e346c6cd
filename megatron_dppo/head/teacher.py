"""A teacher in the fused head: the divergence from it over the whole vocabulary, in the chunks of the policy's loss.

The teacher's hidden states go through its own output layer chunk by chunk, beside the student's. Its two totals of a
row travel in the gather of the student's statistics; one all-reduce of four numbers a row adds up the divergence, and
its gradient takes the place of the teacher's logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.head.row_plan import Chunk, Rows
from megatron_dppo.head.rows import Head, RowTotals
from megatron_dppo.types import Divergence, LossOutput, Metric, TokenTargets

_LOG_ZERO = -1e4
"""exp of it is 0; a finite stand-in for log 0, so that 0 log 0 comes out as 0 without a branch."""


_BLOCK_BYTES = 1 << 20
"""Of a block of rows on the CPU: a few of them are in the cache of a core."""


_CUDA_BLOCK_BYTES = 1 << 26


class Side(NamedTuple):
    """One of the two distributions on a shard, by row."""

    logits: Tensor
    """[n, W]"""
    maximum: Tensor
    """[n] the largest logit of the whole row, before the temperature"""
    log_total: Tensor
    """[n] log of the sum of exp((logit - maximum) / temperature) over the whole row"""


def shard_totals(logits: Tensor, own: int, temperature: float) -> Tensor:
    """``[n, 2]``: the largest of the first ``own`` of ``logits [n, W]`` and the sum of exp((logit - it) / temperature),
    -inf and 0 of a shard without entries."""
    found = logits.new_zeros(len(logits), 2)
    if not own or not len(logits):
        found[:, 0] = -torch.inf
        return found
    for block, out in _blocks(own, logits[:, :own], found):
        out[:, 0] = block.amax(1)
        top = out[:, :1].clamp(min=torch.finfo(block.dtype).min)
        out[:, 1] = ((block - top) / temperature).exp_().sum(1)
    return found


def merge_totals(parts: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The shards' ``[ranks, n, 2]`` to the maximum and the log of the total of the whole rows, ``[n]`` each."""
    maximum = parts[..., 0].amax(0)
    return maximum, (((parts[..., 0] - maximum) / temperature).exp() * parts[..., 1]).sum(0).log()


def shard_sums(student: Side, teacher: Side, own: int, temperature: float, divergence: Divergence) -> Tensor:
    """``[n, 4]`` this shard's part of reverse, forward, sum p log(p / m) and sum q log(q / m), the last two for ``jsd``
    only. The teacher's logits become its log-probabilities."""
    sums = student.maximum.new_zeros(len(student.maximum), 4)
    if not own or not len(sums):
        return sums
    columns = (sums, student.maximum, student.log_total, teacher.maximum, teacher.log_total)
    for z, u, out, top_p, total_p, top_q, total_q in _blocks(
        own, student.logits[:, :own], teacher.logits[:, :own], *columns
    ):
        log_p = _log_probabilities(z, top_p, total_p, temperature)
        log_q = u.copy_(_log_probabilities(u, top_q, total_q, temperature))
        p, q, a = log_p.exp(), log_q.exp(), log_p - log_q
        out[:, 0] = (p * a).sum(1)
        out[:, 1] = -(q * a).sum(1)
        if divergence.name == "jsd":
            log_m = _log_mixture(log_p, log_q, divergence.share)
            out[:, 2] = p.mul_(log_p - log_m).sum(1)
            out[:, 3] = q.mul_(log_q - log_m).sum(1)
    return sums


def values(sums: Tensor, divergence: Divergence) -> Tensor:
    """``[n]`` the divergence from the sums ``[n, 4]`` of all shards, without its coefficient."""
    reverse, forward, of_student, of_teacher = sums.unbind(1)
    if divergence.name == "jsd":
        return (1 - divergence.share) * of_student + divergence.share * of_teacher
    share = {"reverse_kl": 0.0, "forward_kl": 1.0, "mixed_kl": divergence.share}[divergence.name]
    return (1 - share) * reverse + share * forward


def gradient_(
    student: Side, log_q: Tensor, own: int, sums: Tensor, weights: Tensor, temperature: float, divergence: Divergence
) -> Tensor:
    """``[n, W]`` the gradient of the student's logits, written over the teacher's log-probabilities.

    Args:
        student: its logits as they are.
        log_q: ``[n, W]`` what ``shard_sums`` left of the teacher's logits.
        own: entries of the shard that are not padding, whose gradient is 0.
        sums: ``[n, 4]`` of all shards.
        weights: ``[n]`` the derivative of the loss in the divergence of each row.
        temperature: divides the logits.
        divergence: which one; its coefficient is in the weights.
    """
    log_q[:, own:] = 0.0
    if not own or not len(log_q):
        return log_q
    name, share = divergence.name, divergence.share
    rows = (student.maximum, student.log_total, sums, weights / temperature)
    for z, target, maximum, total, of_row, weight in _blocks(own, student.logits[:, :own], log_q[:, :own], *rows):
        log_p = _log_probabilities(z, maximum, total, temperature)
        p = log_p.exp()
        if name == "jsd":
            log_m = _log_mixture(log_p, target, share)
            slope = (log_p.sub_(log_m).sub_(of_row[:, 2:3])).mul_(p).mul_(1 - share)
        else:
            forward = {"reverse_kl": 0.0, "forward_kl": 1.0, "mixed_kl": share}[name]
            slope = log_p.sub_(target).sub_(of_row[:, :1]).mul_(1 - forward).mul_(p)
            if forward:
                slope.add_(p.sub_(target.exp()), alpha=forward)
        target.copy_(slope.mul_(weight[:, None]))
    return log_q


def add_(out: Tensor, gradient: Tensor) -> Tensor:
    """``gradient [n, W]``, which is used up, added to ``out [n, W]`` of the same or a narrower type; rounded once."""
    if len(out):
        for target, block in _blocks(out.shape[1], out, gradient):
            target.copy_(block.add_(target))
    return out


def _log_probabilities(logits: Tensor, maximum: Tensor, log_total: Tensor, temperature: float) -> Tensor:
    z = (logits - maximum[:, None]).mul_(1 / temperature)
    return z.sub_(log_total[:, None]).clamp_(min=_LOG_ZERO)


def _log_mixture(log_p: Tensor, log_q: Tensor, share: float) -> Tensor:
    return torch.logaddexp(log_p + math.log1p(-share), log_q + math.log(share))


def _blocks(own: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same few rows of each tensor at a time."""
    size = _CUDA_BLOCK_BYTES if tensors[0].is_cuda else _BLOCK_BYTES
    step = max(1, size // (own * tensors[0].element_size()))
    return zip(*(tensor.split(step) for tensor in tensors), strict=True)


COLUMNS = 2
"""Numbers of a row that the teacher's shard adds to what is gathered."""


class Lesson(NamedTuple):
    """A teacher's side of the loss of T rows."""

    hidden: Tensor
    """[T, H] its last hidden states; H is its own"""
    weight: Tensor
    """[V_local, H] its shard of the output layer: of the same ids as the student's"""
    divergence: Divergence


@dataclass(frozen=True)
class Taught:
    """What became of a chunk."""

    loss_sum: Tensor
    """scalar, with the coefficient, without gradient"""
    metrics: dict[str, Metric]
    gradient: Tensor | None
    """[n, W] of the student's logits"""


class Teaching:
    """A lesson in one call of the head.

    Args:
        lesson: of the T rows of the call.
        student: the policy's output layer.
        rows: the rows of the call.
        vocab_size: V without padding, of both.
        targets: of the T rows.

    Raises:
        ValueError: the two do not fit each other, or a row that is computed has no gradient by the plan.
    """

    def __init__(self, lesson: Lesson, student: Head, rows: Rows, vocab_size: int, targets: TokenTargets) -> None:
        hidden, weight, self._divergence = lesson
        self._head = Head.of(hidden, weight, None, student.group, vocab_size, student.temperature)
        if len(hidden) != rows.length or len(weight) != len(student.weight) or self._head.dtype != student.dtype:
            raise ValueError(
                f"the teacher has {len(hidden)} rows and {len(weight)} entries of the vocabulary in "
                f"{self._head.dtype}, the student {rows.length} and {len(student.weight)} in {student.dtype}; they "
                "must be the same"
            )
        if rows.num_gradient != rows.count:
            raise ValueError("a divergence has a gradient in every row with loss; make the plan without advantages")
        if targets.kept is not None:
            raise ValueError("a divergence from a teacher is over the whole vocabulary, but targets.kept is given")
        self._hidden, self._rows = hidden, rows

    def new_logits(self, rows: int) -> Tensor:
        """Memory for the teacher's logits of ``rows`` rows."""
        return self._head.new_logits(rows)

    def start(self, chunk: Chunk, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """The teacher's logits ``[n, W]`` of a chunk, and the ``[n, COLUMNS]`` that are gathered."""
        logits = self._head.logits(self._rows.take(self._hidden, chunk.start, chunk.stop), buffer)
        return logits, shard_totals(logits, self._head.own, self._head.temperature)

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
    ) -> Taught:
        """The divergence of a chunk.

        Args:
            logits: ``[n, W]`` the student's.
            totals: of its rows.
            teacher_logits: ``[n, W]``, which become the gradient.
            parts: ``[ranks, n, COLUMNS]`` the gathered ones.
            targets: of the rows.
            scale: what the gradient is multiplied by; None = 1.
            differentiates: whether it is wanted.
        """
        head, divergence = self._head, self._divergence
        student = Side(logits, totals.maximum, totals.total.log())
        teacher = Side(teacher_logits, *merge_totals(parts, head.temperature))
        sums = shard_sums(student, teacher, head.own, head.temperature, divergence)
        if head.group is not None:
            dist.all_reduce(sums, group=head.group)
        mask, weights = _row_weights(targets, divergence.coef, sums.dtype)
        terms = torch.where(mask, weights * values(sums, divergence), 0.0)
        count = mask.sum()

        def mean(column: Tensor) -> Metric:
            return Metric(torch.where(mask, column, 0.0).sum(), count)

        metrics = {"teacher_reverse_kl": mean(sums[:, 0]), "teacher_forward_kl": mean(sums[:, 1])}
        if divergence.name == "jsd":
            metrics["teacher_jsd"] = mean(values(sums, divergence))
        metrics["distillation_loss"] = Metric(terms.sum(), count)
        gradient = None
        if differentiates:
            weights = weights if scale is None else weights * scale
            gradient = gradient_(student, teacher_logits, head.own, sums, weights, head.temperature, divergence)
        return Taught(terms.sum(), metrics, gradient)


def with_lesson(output: LossOutput, loss_sum: Tensor, metrics: Mapping[str, Metric]) -> LossOutput:
    """The output with a divergence added: to the loss, also as it is reported."""
    merged = {**output.metrics, **metrics}
    if "loss" in output.metrics:
        own = output.metrics["loss"]
        merged["loss"] = Metric(own.numerator + loss_sum.detach(), own.denominator)
    return replace(output, loss_sum=output.loss_sum + loss_sum, metrics=merged)


def _row_weights(targets: TokenTargets, coef: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Which rows count, as in ``losses.policy_loss``, and the weight of each, 0 elsewhere."""
    mask = targets.loss_mask
    if targets.rollout_logprobs is not None:
        mask = mask & targets.rollout_logprobs.isfinite()
    weights = mask.to(dtype) * coef
    return mask, weights if targets.token_weights is None else weights * targets.token_weights.to(dtype)
