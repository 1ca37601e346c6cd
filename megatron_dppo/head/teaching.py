"""A teacher in the fused head: the divergence from it over the whole vocabulary, in the chunks of the policy's loss.

The teacher's hidden states go through its own output layer chunk by chunk, beside the student's. Its two totals of a
row travel in the gather of the student's statistics; one all-reduce of four numbers a row adds up the divergence, and
its gradient takes the place of the teacher's logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.head.divergence import Side, gradient_, merge_totals, shard_sums, shard_totals, values
from megatron_dppo.head.row_plan import Chunk, Rows
from megatron_dppo.head.rows import Head, RowTotals
from megatron_dppo.types import Divergence, LossOutput, Metric, TokenTargets

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
