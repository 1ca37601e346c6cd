"""One step's samples to optimizer updates: recomputed inputs, mini-batches, balanced ranks, packed rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.config.train import TrainConfig
from megatron_dppo.data.balance import assign_samples
from megatron_dppo.data.routing import with_all_routes
from megatron_dppo.head.teacher import TeacherTargets
from megatron_dppo.losses import BatchTotals, policy_objective, token_weights
from megatron_dppo.parallel.objects import exchange, from_each
from megatron_dppo.report.clock import Clock
from megatron_dppo.types import MicroBatch, MicroBatches, StepResult, TrainingSample

if TYPE_CHECKING:
    from megatron_dppo.mcore.row import RowRecord
    from megatron_dppo.mcore.teacher_model import TeacherModel
    from megatron_dppo.policy.packed import Packed, TokenRecorder
    from megatron_dppo.policy.trainer import PolicyTrainer


class Updater:
    """Optimizer updates of one policy by one loss.

    Args:
        trainer: the policy.
        train: mini-batches, epochs and packing.
        loss: the loss; ``required_inputs`` says what is recomputed.
        with_reference: recompute the reference's log-probabilities even if the loss needs none.
        teacher: the divergence from it is a term of the loss; None = there is no such term.
        score: a teacher whose log-probabilities the samples get; None = none.
        watch: gets every token of every update; None = nobody looks.
    """

    def __init__(
        self,
        trainer: PolicyTrainer,
        train: TrainConfig,
        loss: LossConfig,
        *,
        with_reference: bool = False,
        teacher: TeacherModel | None = None,
        score: TeacherModel | None = None,
        watch: TokenRecorder | None = None,
    ) -> None:
        self._trainer, self._train, self._loss = trainer, train, loss
        self._teacher, self._score, self._watch = teacher, score, watch
        self._recomputed = loss.required_inputs | ({"reference_logprobs"} if with_reference else set())
        self._objective = policy_objective(loss)
        # Of the last update of a step, where pi and mu are furthest apart: once is enough, and costs nothing then.
        self._last_objective = policy_objective(loss, counterfactuals=True)

    def run(
        self,
        samples: Sequence[TrainingSample],
        seed: int,
        clock: Clock,
        check: Callable[[Mapping[str, float]], None] | None = None,
        parts: Callable[[int], list[list[int]]] | None = None,
    ) -> Iterator[StepResult]:
        """One update for each mini-batch of each epoch; the rollout log-probabilities stay the anchor of all.

        Args:
            samples: this data-parallel rank's, as many on every rank, as ``add_recomputed`` gave them.
            seed: of the order, the same on the ranks that share these samples.
            clock: gets the time of each part.
            check: gets the metrics of the first update before it is applied, and may refuse it by an exception.
            parts: the samples of each mini-batch of an epoch; None = by ``seed``.
        """
        for epoch in range(self._train.epochs):
            every = parts(epoch) if parts else mini_batches(len(samples), self._train.mini_batches, seed, epoch)
            for number, part in enumerate(every):
                with clock.part("waiting"):  # for the slowest rank's rollouts
                    own, packed = self._packed([samples[i] for i in part])
                    batches = self._weighted(packed)
                teacher_targets: list[TeacherTargets] = []
                if self._teacher is not None:
                    with clock.part("recompute"):
                        teacher_targets = self._teacher.compute_targets(batches)
                with clock.part("forward_backward"):
                    last = epoch == self._train.epochs - 1 and number == len(every) - 1
                    objective = self._last_objective if last else self._objective
                    seen: list[RowRecord] | None = None if self._watch is None else []
                    metrics = self._trainer.accumulate(batches, objective, teacher_targets, seen)
                    del teacher_targets
                if self._watch is not None and seen is not None:
                    self._watch.add(own, packed, seen, self._trainer.row_shape)
                if check is not None and epoch == number == 0:
                    check(metrics)
                with clock.part("optimizer"):
                    result = self._trainer.apply(metrics)
                yield result

    def add_recomputed(self, samples: Sequence[TrainingSample], clock: Clock) -> list[TrainingSample]:
        """The samples with the log-probabilities that are compared with, before the first update changes them.

        Only the last pipeline stage gets them; the others compute no loss.
        """
        result, shape = list(samples), self._trainer.routing_shape
        if shape is not None and self._train.router_replay in ("rollout", "compare"):
            layers = self._trainer.replayed_layers
            own = shape if layers is None else replace(shape, num_layers=len(layers))
            result = with_all_routes(result, shape, own)
        records = self._train.router_replay == "recorded"
        for field in ("recomputed_logprobs", "reference_logprobs", "teacher_logprobs"):
            needed = field in self._recomputed or (field == "teacher_logprobs" and self._score is not None)
            # The pass that recomputes log-probabilities computes what recording needs; otherwise recording runs a pass.
            with_routes = records and field == "recomputed_logprobs"
            if needed or with_routes:
                with clock.part("recompute"):
                    result = self._recompute(result, field if needed else None, with_routes=with_routes)
        return result

    def _recompute(
        self, samples: list[TrainingSample], field: str | None, *, with_routes: bool
    ) -> list[TrainingSample]:
        """The samples with what a pass over all of them gives: log-probabilities in ``field``, and routes."""
        trainer, budget = self._trainer, self._train.micro_batch_tokens
        packed = trainer.pack(samples, budget)
        columns: dict[str, list[torch.Tensor]] = {}  # no log-probabilities but on the last stage
        if with_routes:
            rows, columns["routed_experts"] = trainer.record_routing(packed.batches)
        elif field == "teacher_logprobs" and self._score is not None:
            rows = self._score.logprobs(packed.batches)
        else:
            rows = trainer.logprobs(packed.batches, reference=field == "reference_logprobs")
        if field is not None:
            columns[field] = [row.float().cpu() for row in rows]
        for name, values in columns.items():
            for part, row in zip(packed.bins, values, strict=False):
                lengths = [trainer.row_shape.padded(samples[i].num_tokens) for i in part]
                for i, start in zip(part, accumulate([0, *lengths]), strict=False):
                    own = row[start : start + samples[i].num_tokens].clone()
                    changes: dict[str, Any] = {name: own}
                    samples[i] = replace(samples[i], **changes)
        return samples

    def pack_batches(self, samples: list[TrainingSample]) -> MicroBatches:
        """This rank's packed micro-batches of one update, equally many on every rank; a collective."""
        return self._weighted(self._packed(samples)[1])

    def _packed(self, samples: list[TrainingSample]) -> tuple[list[TrainingSample], Packed]:
        """The samples that this rank trains on, and how they are packed; a collective."""
        trainer, train = self._trainer, self._train
        group, bins = trainer.groups.dp, None
        if train.balance_ranks and group is not None and dist.get_world_size(group) > 1:
            samples, bins = self._balance(samples, group)
        return samples, trainer.pack(samples, train.micro_batch_tokens, bins)

    def _weighted(self, packed: Packed) -> MicroBatches:
        return packed.batches.map(lambda batch: weighted(batch, packed.totals, self._loss))

    def _balance(
        self, samples: list[TrainingSample], group: dist.ProcessGroup
    ) -> tuple[list[TrainingSample], list[list[int]]]:
        """The samples that this rank trains on, taken from all ranks, and which of them make up each micro-batch."""
        trainer, me = self._trainer, dist.get_rank(group)
        lengths = from_each([trainer.row_shape.padded(sample.num_tokens) for sample in samples], group)
        rows = assign_samples(
            [length for mine in lengths for length in mine],
            len(lengths),
            self._train.micro_batch_tokens,
            attention_length=trainer.attention_length,
            lockstep=trainer.layout.lockstep_ranks,
            multiple=trainer.layout.micro_batch_multiple,
        )
        owner = {i: rank for rank, mine in enumerate(rows) for row in mine for i in row}
        outgoing: list[list[TrainingSample]] = [[] for _ in lengths]
        for i, sample in enumerate(samples, sum(map(len, lengths[:me]))):
            outgoing[owner[i]].append(sample)
        # They come in the order of the ranks that had them, which is that of the indices.
        place = {i: n for n, i in enumerate(sorted(i for row in rows[me] for i in row))}
        return exchange(outgoing, group), [[place[i] for i in row] for row in rows[me]]


def mini_batches(count: int, parts: int, seed: int, epoch: int) -> list[list[int]]:
    """Which of ``count`` samples are in each of an epoch's ``parts`` mini-batches, in the order of training.

    Example:
        >>> mini_batches(4, 2, seed=0, epoch=0)
        [[0, 3], [1, 2]]
    """
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    size = count // parts
    return [order[start : start + size] for start in range(0, count, size)]


def weighted(batch: MicroBatch, totals: BatchTotals, loss: LossConfig) -> MicroBatch:
    """The batch with the weights that ``loss.aggregation`` gives its tokens."""
    if loss.resolved_aggregation == "token_mean":
        return batch
    weights = token_weights(batch.loss_mask, batch.sequence_ids, loss.resolved_aggregation, totals, loss.horizon)
    return replace(batch, token_weights=weights)
