"""The run: collect, train, publish, log, evaluate, save. Every rank runs the same loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron_dppo.config.schema import Config
from megatron_dppo.errors import TrainingStopped
from megatron_dppo.policy.update import Updater
from megatron_dppo.report.clock import PROGRESS, Clock
from megatron_dppo.report.console import Console
from megatron_dppo.rollout.collect import to_samples
from megatron_dppo.rollout.teacher import TeacherServers
from megatron_dppo.run.advantages import (
    group_advantages,
    kl_metrics,
    refined_advantages,
    taught_advantages,
    teacher_metrics,
)
from megatron_dppo.run.evaluation import reduce_over_samples
from megatron_dppo.run.export import export_results
from megatron_dppo.run.guard import FirstUpdateGuard, dropped_tokens
from megatron_dppo.run.logbook import request_metrics, step_metrics
from megatron_dppo.run.recording import StepRecord
from megatron_dppo.run.sampling import sampling_seed
from megatron_dppo.run.session import Session, open_session
from megatron_dppo.run.stream.collected import Collected
from megatron_dppo.run.teacher import scored
from megatron_dppo.supervision.processes import no_orphans, stop_when_torchrun_dies
from megatron_dppo.supervision.stop_signal import Stopped, StopSignal
from megatron_dppo.types import FinishReason, Metric, RolloutGroup, StepResult, TrainingSample

if TYPE_CHECKING:
    from megatron_dppo.mcore.teacher import Teacher
    from megatron_dppo.parallel.groups import ParallelGroups
    from megatron_dppo.policy.trainer import PolicyTrainer


def run(config: Config) -> int:
    """Train with ``config``; return the exit code (0, also when a signal ended the run after a save)."""
    with no_orphans(), StopSignal() as stop:
        stop_when_torchrun_dies()
        try:
            with open_session(config, stop) as session:
                session.begin()
                stop.deferring = True
                _train(session, stop)
        except Stopped as reason:
            Console(enabled=os.environ["RANK"] == "0" and config.log.progress).say(f"stopped  {reason}")
    return 0


def _train(session: Session, stop: StopSignal) -> None:
    config, state, inputs = session.config, session.state, session.inputs
    trainer, stream, gpus = session.trainer, session.stream, session.gpus
    evaluator, checkpoints = session.evaluator, session.checkpoints
    records, recorder = session.records, session.recorder
    with PROGRESS.part("publish"):
        records.show_servers(gpus.for_sampling())
    if state.step == 0 or state.evaluation_due:
        records.log(state.step, evaluator.evaluate(state.step))
    if stop.requested():
        raise Stopped(f"by {stop.name} before the next step; the same command continues the run")
    records.console.start("training", config.run.num_steps, state.step)
    while state.step < config.run.num_steps and not state.has_reached(config.eval.stop_at_accuracy):
        PROGRESS.enter("loop", state.step)
        clock = Clock()
        with clock.part("publish"):
            records.show_servers(gpus.for_sampling())
        collected = stream.collect(state.step, trainer.policy_version, clock)
        samples = make_samples(collected.groups, config)
        with clock.part("publish"):
            records.show_servers(gpus.for_training())
        record = recorder.begin(state.step + 1)
        results = update_policy(trainer, config, session.teacher, state.step, collected, samples, clock, record)
        state.count_skipped(results)
        stream.settle(clock)
        if late := evaluator.finish():  # of the weights that the engine still has
            records.log(*late)
        state.step += 1
        if record is not None:
            with clock.part("record"):
                recorder.write(state.step, record, collected, records.writer)
        evaluating = config.eval.is_due(state.step, config.run.num_steps)
        with clock.part("publish"):
            records.show_servers(gpus.after_update(samples_next=evaluating))
        requests = request_metrics(session.engine, has_servers=config.rollout.engine != "local", dp=inputs.layout.dp)
        values = step_metrics(session.groups, collected, samples, results, clock, requests, dp=inputs.layout.dp)
        if evaluating:
            values |= evaluator.evaluate(state.step)
        records.log(state.step, values)
        stopping = stop.requested()
        stuck = state.skipped_in_a_row >= config.train.max_skipped_updates
        best = state.is_new_best(values.get("eval/accuracy")) and config.checkpoint.keep_best
        if best or stopping or stuck or checkpoints.is_due(state):
            with PROGRESS.part("save"):
                records.show_servers(gpus.for_training())
                checkpoints.save(state, evaluator)
        checkpoints.finish(wait=stopping or stuck or checkpoints.waits)
        if stuck:
            raise _stuck(state.skipped_in_a_row, config)
        if stopping:
            raise Stopped(f"by {stop.name} after step {state.step}; the same command continues the run")
    checkpoints.finish(wait=True)
    if state.best is not None and state.has_reached(config.eval.stop_at_accuracy):
        records.console.say(
            f"solved   eval/accuracy {state.best[0]:.3f} at step {state.best[1]} reached eval.stop_at_accuracy = "
            f"{config.eval.stop_at_accuracy}"
        )
    with PROGRESS.part("export"):
        records.show_servers(gpus.for_training())
        export_results(trainer, inputs, config)
        records.summarize(trainer.policy_version, evaluator.answers_before)


def make_samples(groups: Sequence[RolloutGroup], config: Config) -> list[TrainingSample]:
    """Rewards to group-relative advantages to training samples."""
    samples = to_samples(groups, group_advantages(groups, config).tolist())
    if not config.train.mask_truncated:
        return samples
    cut = [r.completion.finish_reason == FinishReason.LENGTH for group in groups for r in group.rollouts]
    return [
        replace(sample, loss_mask=torch.zeros_like(sample.loss_mask)) if is_cut else sample
        for sample, is_cut in zip(samples, cut, strict=True)
    ]


def update_policy(
    trainer: PolicyTrainer,
    config: Config,
    teacher: Teacher | TeacherServers | None,
    step: int,
    collected: Collected,
    samples: Sequence[TrainingSample],
    clock: Clock,
    record: StepRecord | None = None,
    parts: Callable[[int], list[list[int]]] | None = None,
) -> list[StepResult]:
    """One optimizer update for each mini-batch of each epoch.

    Args:
        trainer: policy of this rank.
        config: configuration of the run.
        teacher: teacher of a distillation, if there is one.
        step: rollout steps done before this one.
        collected: rollouts of this rank.
        samples: what ``make_samples`` made of them.
        clock: gets the time of each part.
        record: gets what the updates saw of each token; None = nobody wants it.
        parts: the samples of each mini-batch of an epoch; None = by the run's seed.

    Raises:
        TrainingStopped: the rollouts are not those of the policy; nothing was updated.
    """
    trainer.optimizer.set_step(step)
    exact = config.distillation.is_exact
    inside = None if isinstance(teacher, TeacherServers) else teacher
    updater = Updater(
        trainer,
        config.train,
        config.loss,
        with_reference=config.needs_reference,
        teacher=inside if exact else None,
        score=None if exact else inside,
        watch=None if record is None else record.watch,
    )
    guard = first_update_guard(trainer.groups, config, collected)
    samples = updater.add_recomputed(samples, clock)
    if isinstance(teacher, TeacherServers):
        with clock.part("recompute"):
            samples = scored(samples, teacher, trainer.groups.replica)
    with clock.part("waiting"):  # for the slowest rank's rollouts, where all ranks' are needed
        samples = refined_advantages(samples, collected.groups, config, trainer.groups.dp)
        own = teacher_metrics(samples, trainer.groups) if teacher is not None and not exact else {}
        samples = samples if teacher is None else taught_advantages(samples, config)
    if record is not None:
        samples = record.numbered(samples, trainer.dp_rank)
    seed = sampling_seed(config, "order", step, trainer.dp_rank)
    results = list(updater.run(samples, seed, clock, guard, parts))
    if config.reward.kl_coef:
        own |= kl_metrics(samples, config, trainer.groups)
    if own:
        results[0] = replace(results[0], metrics={**results[0].metrics, **own})
    return results


def first_update_guard(groups: ParallelGroups, config: Config, collected: Collected) -> FirstUpdateGuard:
    """Return the guard of this step's first update; a collective over all ranks."""
    local = {
        "dropped": dropped_tokens(collected.groups),
        "oldest": Metric(max(collected.token_ages, default=0), kind="max"),
    }
    found = reduce_over_samples(groups, local)
    return FirstUpdateGuard.of(config, dropped=found["dropped"], on_policy=found["oldest"] == 0)


def _stuck(skipped: int, config: Config) -> TrainingStopped:
    return TrainingStopped(
        f"the gradient was not finite in {skipped} updates in a row (train.max_skipped_updates = "
        f"{config.train.max_skipped_updates}); none of them was applied, and the weights were saved. Look at "
        f"train/ratio_max, train/prob_rise_max and train/grad_norm in {Path(config.run.output_dir) / 'metrics.jsonl'}: "
        "a rollout engine whose log-probabilities do not fit the weights, a learning rate that is too high, and bf16 "
        "overflow are usual causes"
    )
