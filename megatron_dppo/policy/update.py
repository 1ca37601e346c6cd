"""Optimizer updates of one rollout step: recomputed inputs, mini-batches, balanced ranks, packed rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_dppo.config.loss import LossConfig, Statistic
from megatron_dppo.config.train import TrainConfig
from megatron_dppo.data.balance import assign_samples
from megatron_dppo.data.replayed_routes import with_all_routes
from megatron_dppo.data.training_samples import group_segments, with_episode_tokens
from megatron_dppo.head.teacher import TeacherTargets
from megatron_dppo.losses import (
    BatchTokens,
    BatchTotals,
    Objective,
    compute_statistics,
    policy_objective,
    sequence_weight,
)
from megatron_dppo.parallel.objects import all_gather_objects, all_to_all_objects
from megatron_dppo.policy.packed import packing_units
from megatron_dppo.policy.server_sums import (
    ServerSums,
    SumsBySource,
    TokenSource,
    gather_sums,
    sum_by_server,
    without_servers,
)
from megatron_dppo.report.clock import Clock
from megatron_dppo.types import MicroBatch, MicroBatches, StepResult, TrainingSample, token_ages

if TYPE_CHECKING:
    from megatron_dppo.mcore.row import RowRecord
    from megatron_dppo.mcore.teacher_model import MegatronTeacher
    from megatron_dppo.policy.packed import PackedBatch, TokenRecorder
    from megatron_dppo.policy.trainer import PolicyTrainer


class _Gradient(NamedTuple):
    """Accumulated gradient of a mini-batch, in the trainer, and what belongs to it."""

    samples: list[TrainingSample]
    packed: PackedBatch
    records: list[RowRecord] | None
    metrics: dict[str, float]
    sums: dict[TokenSource, ServerSums]


class Updater:
    """Runs the optimizer updates of one policy with one loss.

    The ``required_inputs`` of the loss name the log-probabilities to recompute; ``with_reference`` adds the
    reference's. The divergence of ``teacher`` is a term of the loss, ``scoring_teacher`` computes the samples'
    ``teacher_logprobs``. ``recorder`` records every token of every update. ``equal_segments`` weighs the segments of an
    episode equally, see ``with_episode_tokens``.

    Attributes:
        excluded: Servers whose samples the check of the last step rejected, by URL with the reason.
    """

    def __init__(
        self,
        trainer: PolicyTrainer,
        train: TrainConfig,
        loss: LossConfig,
        *,
        with_reference: bool = False,
        teacher: MegatronTeacher | None = None,
        scoring_teacher: MegatronTeacher | None = None,
        recorder: TokenRecorder | None = None,
        equal_segments: bool = False,
    ) -> None:
        self._trainer = trainer
        self._train = train
        self._loss = loss
        self._teacher = teacher
        self._scoring_teacher = scoring_teacher
        self._recorder = recorder
        self._equal_segments = equal_segments
        # A loss of sequences needs all tokens of an episode in one row. Other losses need their number alone.
        self._joins_segments = "sequence_ids" in loss.required_inputs
        self.excluded: dict[str, str] = {}
        self._recomputed = loss.required_inputs | ({"reference_logprobs"} if with_reference else set())

    def run(
        self,
        samples: Sequence[TrainingSample],
        seed: int,
        clock: Clock,
        check: Callable[[Mapping[str, float], SumsBySource], dict[str, str]] | None = None,
        split: Callable[[int], list[list[int]]] | None = None,
    ) -> Iterator[StepResult]:
        """Yield the result of one update for each mini-batch of each epoch.

        All updates keep the same anchor: the rollout log-probabilities of the samples, which have their recomputed
        inputs (``add_recomputed``). Every rank has equally many episodes. ``seed`` is the same on all ranks that share
        these samples.

        ``check`` receives the metrics of the first update and the sums of each server before it is applied. It returns
        the servers whose samples are left out, by URL with the reason, or raises. ``split`` returns the indices of the
        episodes of each mini-batch of an epoch. None shuffles by ``seed``.
        """
        episodes = group_segments(samples)
        # Before the first update: with the weights that the step starts with.
        with clock.part("recompute"):
            statistics = self._statistics(samples, self._loss.step_statistics())
        for epoch in range(self._train.epochs):
            if split is not None:
                mini_batches = split(epoch)
            else:
                mini_batches = split_into_mini_batches(len(episodes), self._train.mini_batches, seed, epoch)
            for number, batch in enumerate(mini_batches):
                indices = [i for episode in batch for i in episodes[episode]]
                is_last = epoch == self._train.epochs - 1 and number == len(mini_batches) - 1
                is_checked = check is not None and epoch == number == 0
                mini_batch = [samples[i] for i in indices]
                gradient = self._accumulate(mini_batch, statistics, clock, is_last, with_sums=is_checked)
                # The gradient exists and no weight has changed: pi and mu differ by numerics alone, which ``check``
                # can judge. Without the samples of the servers that it rejects, the gradient is computed once more.
                while is_checked and check is not None and (rejected := check(gradient.metrics, gradient.sums)):
                    self.excluded |= rejected
                    samples = [without_servers(sample, rejected) for sample in samples]
                    mini_batch = [samples[i] for i in indices]
                    gradient = self._accumulate(mini_batch, statistics, clock, is_last, with_sums=True)
                if self._recorder is not None and gradient.records is not None:
                    version = self._trainer.policy_version
                    self._recorder.add(gradient.samples, gradient.packed, gradient.records, version)
                with clock.part("optimizer"):
                    has_tokens = gradient.packed.totals.num_tokens > 0
                    result = (self._trainer.apply if has_tokens else self._trainer.skip)(gradient.metrics)
                yield result

    def _accumulate(
        self,
        mini_batch: list[TrainingSample],
        step_statistics: dict[str, float],
        clock: Clock,
        is_last: bool,
        *,
        with_sums: bool,
    ) -> _Gradient:
        """Accumulate the gradient of one mini-batch; a collective of all ranks."""
        # Packing starts with a collective, so "waiting" also measures the wait for the slowest rank's rollouts.
        with clock.part("recompute"):
            statistics = step_statistics | self._statistics(mini_batch, self._loss.update_statistics())
        with clock.part("waiting"):
            samples, packed = self._pack(mini_batch)
            batches = self._add_token_weights(packed)

        teacher_targets: list[TeacherTargets] = []
        if self._teacher is not None:
            with clock.part("recompute"):
                teacher_targets = self._teacher.compute_targets(batches)

        with clock.part("forward_backward"):
            # Counterfactual metrics are computed in the last update of a step only: there pi and mu are furthest apart.
            objective = policy_objective(self._loss, counterfactuals=is_last, statistics=statistics)
            records: list[RowRecord] | None = [] if with_sums or self._recorder is not None else None
            metrics = self._trainer.accumulate(batches, objective, teacher_targets, records)
            # The targets hold the teacher's output layer on the device: free it before the optimizer step.
            del teacher_targets
        sums: dict[TokenSource, ServerSums] = {}
        if with_sums:
            differences = self._trainer.route_differences(batches)
            local = sum_by_server(samples, packed, records or [], self._trainer.policy_version, differences)
            sums = gather_sums(local, self._trainer.groups)
        return _Gradient(samples, packed, records, metrics, sums)

    def add_recomputed(self, samples: Sequence[TrainingSample], clock: Clock) -> list[TrainingSample]:
        """Return the samples with the routes and log-probabilities that the loss needs.

        Call it before the first update changes the policy. Log-probabilities exist on the last pipeline stage only;
        the other stages compute no loss.
        """
        result = list(samples)
        shape = self._trainer.routing_shape
        if shape is not None and self._train.router_replay in ("rollout", "compare"):
            layers = self._trainer.replayed_layers
            stage_shape = shape if layers is None else replace(shape, num_layers=len(layers))
            result = with_all_routes(result, shape, stage_shape)

        records_routes = self._train.router_replay == "recorded"
        for field in ("recomputed_logprobs", "reference_logprobs", "teacher_logprobs"):
            is_scored = field == "teacher_logprobs" and self._scoring_teacher is not None
            is_needed = field in self._recomputed or is_scored
            # One forward pass both records routes and recomputes log-probabilities; recording alone needs a pass too.
            with_routes = records_routes and field == "recomputed_logprobs"
            if is_needed or with_routes:
                with clock.part("recompute"):
                    result = self._recompute(result, field if is_needed else None, with_routes=with_routes)
        return result

    def objective(self, samples: Sequence[TrainingSample]) -> Objective:
        """Return the loss for one update with the current weights, as the first of a step; a collective."""
        statistics = self._statistics(samples, self._loss.declared_statistics())
        return policy_objective(self._loss, statistics=statistics)

    def _statistics(self, samples: Sequence[TrainingSample], declared: Mapping[str, Statistic]) -> dict[str, float]:
        """Return the declared statistics of all data-parallel ranks' loss tokens, from a forward pass; a collective."""
        if not declared:
            return {}
        # Pipeline stages that compute no loss have no log-probabilities, and read no statistics.
        columns = [torch.zeros(3, 0)]
        for sample in self._recompute(list(samples), "recomputed_logprobs", with_routes=False):
            logprobs = sample.recomputed_logprobs
            rollout_logprobs = sample.rollout_logprobs
            if logprobs is not None and rollout_logprobs is not None:
                tokens = BatchTokens.select(logprobs, rollout_logprobs, sample.advantages, sample.loss_mask)
                columns.append(torch.stack(tokens))
        batch = torch.cat(all_gather_objects(torch.cat(columns, 1), self._trainer.groups.dp), 1)
        return compute_statistics(declared, BatchTokens(*batch))

    def _recompute(
        self, samples: list[TrainingSample], field: str | None, *, with_routes: bool
    ) -> list[TrainingSample]:
        """Run one forward pass and add its log-probabilities as ``field`` and its routes to the samples."""
        trainer = self._trainer
        packed = trainer.pack(samples, self._train.micro_batch_tokens)

        # Log-probabilities are empty on all but the last pipeline stage; routes exist on every stage.
        columns: dict[str, list[torch.Tensor]] = {}
        if with_routes:
            rows, columns["routed_experts"] = trainer.record_routing(packed.batches)
        elif field == "teacher_logprobs" and self._scoring_teacher is not None:
            rows = self._scoring_teacher.logprobs(packed.batches)
        else:
            rows = trainer.logprobs(packed.batches, reference=field == "reference_logprobs")
        if field is not None:
            columns[field] = [row.float().cpu() for row in rows]

        # Cut the packed rows back into samples.
        for name, values in columns.items():
            for i, where, number in packed.positions(samples) if values else ():
                changes: dict[str, Any] = {name: values[number][where].clone()}
                samples[i] = replace(samples[i], **changes)
        return samples

    def pack_batches(self, samples: list[TrainingSample]) -> MicroBatches:
        """Return the packed micro-batches of one update, equally many on every rank; a collective."""
        return self._add_token_weights(self._pack(samples)[1])

    def _pack(self, samples: list[TrainingSample]) -> tuple[list[TrainingSample], PackedBatch]:
        """Return the samples that this rank trains on, and their packing; a collective."""
        if "ages" in self._recomputed:
            version = self._trainer.policy_version
            samples = [replace(s, ages=token_ages(s.sources, s.num_tokens, version)) for s in samples]
        group = self._trainer.groups.dp
        samples = with_episode_tokens(samples, equal_segments=self._equal_segments)
        bins = None
        if self._train.balance_ranks and group is not None and dist.get_world_size(group) > 1:
            samples, bins = self.balance(samples, group)
        budget = self._train.micro_batch_tokens
        return samples, self._trainer.pack(samples, budget, bins, joins_segments=self._joins_segments)

    def _add_token_weights(self, packed: PackedBatch) -> MicroBatches:
        return packed.batches.map(lambda batch: add_token_weights(batch, packed.totals, self._loss))

    def balance(
        self, samples: list[TrainingSample], group: dist.ProcessGroup
    ) -> tuple[list[TrainingSample], list[list[int]]]:
        """Exchange samples so that all ranks take about the same time; return this rank's, and their micro-batches."""
        trainer = self._trainer
        rank = dist.get_rank(group)
        units = packing_units(samples, trainer.row_shape, joins_segments=self._joins_segments)
        local = [(unit.num_tokens, len(unit.indices)) for unit in units]
        rank_units = all_gather_objects(local, group)
        lengths = [length for each in rank_units for length, _ in each]
        sizes = [size for each in rank_units for _, size in each]

        # Every rank computes the same assignment from the lengths of all units, so none has to be sent.
        assignment = assign_samples(
            lengths,
            len(rank_units),
            self._train.micro_batch_tokens,
            attention_length=trainer.attention_length,
            lockstep=trainer.layout.lockstep_ranks,
            multiple=trainer.layout.micro_batch_multiple,
        )
        target_ranks = {i: target for target, rows in enumerate(assignment) for row in rows for i in row}
        outgoing: list[list[TrainingSample]] = [[] for _ in rank_units]
        first_index = sum(map(len, rank_units[:rank]))
        for i, unit in enumerate(units, first_index):
            outgoing[target_ranks[i]] += [samples[n] for n in unit.indices]

        # ``all_to_all_objects`` returns samples in the order of their source ranks: that of their units' indices.
        local_indices: dict[int, list[int]] = {}
        num_received = 0
        for i in sorted(i for row in assignment[rank] for i in row):
            local_indices[i] = list(range(num_received, num_received + sizes[i]))
            num_received += sizes[i]
        bins = [[n for i in row for n in local_indices[i]] for row in assignment[rank]]
        return all_to_all_objects(outgoing, group), bins


def split_into_mini_batches(count: int, parts: int, seed: int, epoch: int) -> list[list[int]]:
    """Return the indices of the episodes of each of an epoch's mini-batches, in the order of training.

    Other samples than agents' are episodes of one.

    Example:
        >>> split_into_mini_batches(4, 2, seed=0, epoch=0)
        [[0, 3], [1, 2]]
    """
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    # ``config.layout`` refuses a number of parts that does not divide the episodes of a rank.
    size = count // parts
    return [order[start : start + size] for start in range(0, count, size)]


def add_token_weights(batch: MicroBatch, totals: BatchTotals, loss: LossConfig) -> MicroBatch:
    """Return the micro-batch with the token weights of ``loss.aggregation``, in which an episode is a sequence."""
    # The token mean divides by the global token count later, once for all micro-batches.
    if loss.resolved_aggregation == "token_mean" and bool((batch.segment_factors == 1).all()):
        return batch
    counts = batch.sequence_loss_tokens.tolist()
    # Few sequences have the same length: one weight is computed for each length.
    weights = {n: sequence_weight(loss.resolved_aggregation, n, totals, loss.horizon) for n in set(counts)}
    by_token = torch.tensor([weights[n] for n in counts], dtype=torch.float32)
    return replace(batch, token_weights=by_token * batch.segment_factors)
