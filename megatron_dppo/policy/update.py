"""One step's samples to optimizer updates: recomputed inputs, mini-batches, balanced ranks, packed rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.balance import balanced_owners
from megatron_dppo.data.routing import with_all_routes
from megatron_dppo.losses import BatchTotals, policy_objective, token_weights
from megatron_dppo.parallel.objects import exchange
from megatron_dppo.report.clock import Clock
from megatron_dppo.types import MicroBatch, MicroBatches, StepResult, TrainingSample

if TYPE_CHECKING:
    from megatron_dppo.policy.trainer import PolicyTrainer


class Updater:
    """Optimizer updates of one policy by one loss.

    Args:
        trainer: the policy.
        train: mini-batches, epochs and packing.
        loss: the loss; ``required_inputs`` says what is recomputed.
    """

    def __init__(self, trainer: PolicyTrainer, train: TrainConfig, loss: LossConfig) -> None:
        self._trainer, self._train, self._loss = trainer, train, loss
        self._objective = policy_objective(loss)

    def run(
        self,
        samples: Sequence[TrainingSample],
        seed: int,
        clock: Clock,
        check: Callable[[Mapping[str, float]], None] | None = None,
    ) -> Iterator[StepResult]:
        """One update for each mini-batch of each epoch; the rollout log-probabilities stay the anchor of all.

        Args:
            samples: this data-parallel rank's, as many on every rank.
            seed: of the order, the same on the ranks that share these samples.
            clock: gets the time of each part.
            check: gets the metrics of the first update before it is applied, and may refuse it by an exception.
        """
        samples = self.add_recomputed(samples, clock)
        size = len(samples) // self._train.mini_batches
        for epoch in range(self._train.epochs):
            order = list(range(len(samples)))
            random.Random(f"{seed}/{epoch}").shuffle(order)
            for start in range(0, len(order), size):
                with clock.part("waiting"):  # for the slowest rank's rollouts
                    batches = self.plan([samples[i] for i in order[start : start + size]])
                with clock.part("forward_backward"):
                    metrics = self._trainer.accumulate(batches, self._objective)
                if check is not None and epoch == start == 0:
                    check(metrics)
                with clock.part("optimizer"):
                    result = self._trainer.apply(metrics)
                yield result

    def add_recomputed(self, samples: Sequence[TrainingSample], clock: Clock) -> list[TrainingSample]:
        """The samples with the log-probabilities that the loss compares with, before the first update changes them.

        Only the last pipeline stage gets them; the others compute no loss.
        """
        result, shape = list(samples), self._trainer.routing_shape
        if shape is not None and self._train.router_replay in ("rollout", "compare"):
            layers = self._trainer.replayed_layers
            own = shape if layers is None else replace(shape, num_layers=len(layers))
            result = with_all_routes(result, shape, own)
        records = self._train.router_replay == "recorded"
        for field in ("anchor_logprobs", "reference_logprobs"):
            needed = field in self._loss.required_inputs
            # The anchor's pass computes what recording needs; without it recording has a pass of its own.
            with_routes = records and field == "anchor_logprobs"
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
        else:
            rows = trainer.logprobs(packed.batches, reference=field == "reference_logprobs")
        if field is not None:
            columns[field] = [row.float().cpu() for row in rows]
        for name, values in columns.items():
            for part, row in zip(packed.bins, values, strict=False):
                lengths = [trainer.row_shape.padded(samples[i].num_tokens) for i in part]
                for i, start in zip(part, accumulate([0, *lengths]), strict=False):
                    own = row[start : start + samples[i].num_tokens].clone()
                    changes: dict[str, torch.Tensor] = {name: own}
                    samples[i] = replace(samples[i], **changes)
        return samples

    def plan(self, samples: list[TrainingSample]) -> MicroBatches:
        """This rank's packed micro-batches of one update, equally many on every rank; a collective."""
        trainer, train, loss = self._trainer, self._train, self._loss
        if train.balance_ranks:
            samples = self._balance(samples)
        packed = trainer.pack(samples, train.micro_batch_tokens)
        return packed.batches.map(lambda batch: weighted(batch, packed.totals, loss))

    def _balance(self, samples: list[TrainingSample]) -> list[TrainingSample]:
        group = self._trainer.groups.dp
        size = dist.get_world_size(group)
        if group is None or size == 1:
            return samples
        lengths: list[list[int]] = [[] for _ in range(size)]
        dist.all_gather_object(lengths, [sample.num_tokens for sample in samples], group=group)
        owners = balanced_owners(lengths)[dist.get_rank(group)]
        outgoing = [[s for s, owner in zip(samples, owners, strict=True) if owner == rank] for rank in range(size)]
        return exchange(outgoing, group)


def weighted(batch: MicroBatch, totals: BatchTotals, loss: LossConfig) -> MicroBatch:
    """The batch with the weights that ``loss.aggregation`` gives its tokens."""
    if loss.resolved_aggregation == "token_mean":
        return batch
    weights = token_weights(batch.loss_mask, batch.sequence_ids, loss.resolved_aggregation, totals, loss.horizon)
    return replace(batch, token_weights=weights)
