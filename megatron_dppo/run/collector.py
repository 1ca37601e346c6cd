"""The engine's part of a step: rollouts with the current weights, their recording, and new weights after the update."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_dppo.config.reward import RewardConfig
from megatron_dppo.config.train import TrainConfig
from megatron_dppo.engines.server_engine import ServerEngine
from megatron_dppo.report.clock import PROGRESS, Clock
from megatron_dppo.report.printable import printable
from megatron_dppo.rollout.engine import RolloutEngine
from megatron_dppo.rollout.scheduler import RolloutScheduler
from megatron_dppo.run.gpus import Gpus
from megatron_dppo.run.guard_state import GuardState
from megatron_dppo.run.recording import StepRecorder
from megatron_dppo.run.step import StepBatch, make_samples
from megatron_dppo.types import Metric
from megatron_dppo_engines.servers.pool import PoolCounts
from megatron_dppo_engines.servers.response_times import find_slowest

if TYPE_CHECKING:
    from megatron_dppo.policy.trainer import PolicyTrainer

_SHOWN_MESSAGES = 128
"""Messages about broken contracts and lost servers that one rank prints in a step: two for each of 64 servers."""


@dataclass(kw_only=True)
class RolloutCollector:
    """Collects the rollouts of each step and gives updated weights to the engine; every call is a collective."""

    train: TrainConfig
    reward: RewardConfig
    has_teacher: bool
    has_servers: bool
    trainer: PolicyTrainer
    engine: RolloutEngine | None
    """None on ranks that get their rollouts from the leader of their model-parallel group."""
    stream: RolloutScheduler
    gpus: Gpus
    """Turns of the engine and the trainer on the GPUs, and the publishing of weights."""
    recorder: StepRecorder
    """Recording of whole steps (``log.rollouts_every``)."""
    show: Callable[[Sequence[str]], None]
    """Prints notes about the servers."""

    def begin(self) -> None:
        """Give the first weights to the engine."""
        with PROGRESS.part("publish"):
            self.show(self.gpus.for_sampling())

    def collect(self, step: int, clock: Clock) -> StepBatch:
        """Return the rollouts of a step and the samples to train on. The GPUs are the trainer's afterwards."""
        with clock.part("publish"):
            self.show(self.gpus.for_sampling())
        collected = self.stream.collect(step, self.trainer.policy_version, clock)
        samples = make_samples(collected.groups, self.train, self.reward, has_teacher=self.has_teacher)
        with clock.part("publish"):
            self.free_gpus()
        ranks = self.engine.take_ranks() if isinstance(self.engine, ServerEngine) else {}
        return StepBatch(step, collected, samples, ranks, self.gpus.probed, self.recorder.begin(step + 1))

    def free_gpus(self) -> None:
        """Let the trainer compute: update the policy, save or export it."""
        self.show(self.gpus.for_training())

    def end_update(self, batch: StepBatch, guard: GuardState, clock: Clock) -> None:
        """Exclude the servers that the guard names, wait until the engine can get new weights, and record the step.

        The engine may still sample for the next step, unless new weights may come in mid-response.
        """
        excluded = guard.take_excluded()
        if excluded:
            self.gpus.exclude(excluded)
        self.show([f"{url} is not used any more in this run: {problem}" for url, problem in excluded.items()])
        self.stream.wait_before_update(clock)
        if batch.record is not None:
            with clock.part("record"):
                self.recorder.write(batch.step + 1, batch.record, batch.collected)

    def publish(self, clock: Clock, *, samples_next: bool) -> None:
        """Give updated weights to the engine. Colocated servers that would sleep again at once are left asleep."""
        with clock.part("publish"):
            self.show(self.gpus.after_update(samples_next=samples_next))

    def take_counts(self) -> PoolCounts:
        """Return the counts of this rank's engine since the last call, and print its messages; not a collective."""
        counts = self.engine.take_counts() if isinstance(self.engine, ServerEngine) else PoolCounts()
        slowest = find_slowest(counts.times)
        notes = [slowest.text] if slowest is not None and slowest.text else []
        for message in counts.messages[:_SHOWN_MESSAGES] + notes:
            print(f"servers  {printable(message)}", file=sys.stderr, flush=True)
        return counts

    def take_request_metrics(self) -> dict[str, Metric]:
        """Return counts of this step's requests, to be summed over the ranks; empty without servers."""
        return request_metrics(self.take_counts(), dp=self.trainer.layout.dp) if self.has_servers else {}


def request_metrics(counts: PoolCounts, *, dp: int) -> dict[str, Metric]:
    """Return the metrics of a rank's requests; the same ones on a rank that gets its rollouts from another."""
    slowest = find_slowest(counts.times)
    return {
        "retried_requests": Metric(counts.retries, 1 / dp),
        "evicted_servers": Metric(counts.evicted_servers, kind="max"),
        "invalid_responses": Metric(counts.invalid_responses, 1 / dp),
        "slowest_server": Metric(1.0 if slowest is None else slowest.factor, kind="max"),
    }
