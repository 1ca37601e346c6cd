"""The run: collect, train, publish, log, evaluate, save. Every rank runs the same loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from megatron_dppo.config.schema import Config, TrainConfig
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
from megatron_dppo.run.evaluation import evaluate, finish_evaluation, reduce_over_samples
from megatron_dppo.run.guard import FirstUpdateGuard, dropped_tokens
from megatron_dppo.run.logbook import finish, log, step_metrics
from megatron_dppo.run.recording import StepRecord, begin_record, write_record
from megatron_dppo.run.sampling import sampling_seed
from megatron_dppo.run.session import Session, open_session
from megatron_dppo.run.session_state import begin, finish_save, save_session
from megatron_dppo.run.stream.collected import Collected
from megatron_dppo.run.teacher import scored
from megatron_dppo.run.updating import Updating
from megatron_dppo.supervision.processes import no_orphans, stop_when_torchrun_dies
from megatron_dppo.supervision.stop_signal import Stopped, StopSignal
from megatron_dppo.types import FinishReason, Metric, RolloutGroup, StepResult, TrainingSample


def run(config: Config) -> int:
    """Train by ``config``; returns the exit code (0, also when a signal ended the run after a save)."""
    with no_orphans(), StopSignal() as stop:
        stop_when_torchrun_dies()
        try:
            with open_session(config, stop) as session:
                begin(session)
                stop.deferring = True
                _train(session, stop)
        except Stopped as reason:
            Console(enabled=os.environ["RANK"] == "0" and config.log.progress).say(f"stopped  {reason}")
    return 0


def _train(session: Session, stop: StopSignal) -> None:
    config = session.config
    with PROGRESS.part("publish"):
        publish(session)
    if session.step == 0 or session.evaluation_due:
        log(session, session.step, evaluate(session))
    if stop.requested():
        raise Stopped(f"by {stop.name} before the next step; the same command continues the run")
    session.console.start("training", config.run.num_steps, session.step)
    while session.step < config.run.num_steps and not session.is_solved:
        PROGRESS.enter("loop", session.step)
        clock = Clock()
        if config.rollout.servers.colocated:
            with clock.part("publish"):
                publish(session)
        collected = session.stream.collect(session.step, session.trainer.policy_version, clock)
        samples = make_samples(collected.groups, config.train)
        with clock.part("publish"):
            session.take_gpus()
        record = begin_record(session)
        results = update_policy(session, collected, samples, clock, record)
        session.stream.settle(clock)
        if late := finish_evaluation(session):  # of the weights that the engine still has
            log(session, *late)
        session.step += 1
        if record is not None:
            with clock.part("record"):
                write_record(session, record, collected)
        evaluating = config.eval.is_due(session.step, config.run.num_steps)
        # Servers on the trainer's GPUs would have to release their memory again before a save.
        if evaluating or not config.rollout.servers.colocated:
            with clock.part("publish"):
                publish(session)
        values = step_metrics(session, collected, samples, results, clock)
        if evaluating:
            values |= evaluate(session)
        log(session, session.step, values)
        stopping = stop.requested()
        if session.is_new_best(values.get("eval/accuracy")) or stopping or save_due(session):
            with PROGRESS.part("save"):
                save_session(session)
        finish_save(session, wait=stopping or session.save_group is None)
        check_health(session)
        if stopping:
            raise Stopped(f"by {stop.name} after step {session.step}; the same command continues the run")
    finish_save(session, wait=True)
    if session.is_solved and session.best is not None:
        reached, goal = f"{session.best[0]:.3f} at step {session.best[1]}", config.eval.stop_at_accuracy
        session.console.say(f"solved   eval/accuracy {reached} reached eval.stop_at_accuracy = {goal}")
    with PROGRESS.part("export"):
        session.take_gpus()
        finish(session)


def make_samples(groups: Sequence[RolloutGroup], train: TrainConfig) -> list[TrainingSample]:
    """Rewards to group-relative advantages to training samples."""
    samples = to_samples(groups, group_advantages(groups, train).tolist())
    if not train.mask_truncated:
        return samples
    cut = [r.completion.finish_reason == FinishReason.LENGTH for group in groups for r in group.rollouts]
    return [
        replace(sample, loss_mask=torch.zeros_like(sample.loss_mask)) if is_cut else sample
        for sample, is_cut in zip(samples, cut, strict=True)
    ]


def update_policy(
    session: Updating,
    collected: Collected,
    samples: Sequence[TrainingSample],
    clock: Clock,
    record: StepRecord | None = None,
    parts: Callable[[int], list[list[int]]] | None = None,
) -> list[StepResult]:
    """One optimizer update for each mini-batch of each epoch.

    Args:
        session: this rank's.
        collected: its rollouts.
        samples: what ``make_samples`` made of them.
        clock: gets the time of each part.
        record: gets what the updates saw of each token; None = nobody wants it.
        parts: the samples of each mini-batch of an epoch; None = by the run's seed.

    Raises:
        TrainingStopped: the rollouts are not those of the policy; nothing was updated.
    """
    session.trainer.optimizer.set_step(session.step)
    config, trainer = session.config, session.trainer
    exact, teacher = config.distillation.is_exact, session.teacher
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
    guard, results = first_update_guard(session, collected), []
    samples = updater.add_recomputed(samples, clock)
    if isinstance(teacher, TeacherServers):
        with clock.part("recompute"):
            samples = scored(samples, teacher, trainer.groups.replica)
    with clock.part("waiting"):  # for the slowest rank's rollouts, where all ranks' are needed
        samples = refined_advantages(samples, collected.groups, config.train, config.reward, group=trainer.groups.dp)
        own = teacher_metrics(samples, trainer.groups) if teacher is not None and not exact else {}
        samples = samples if teacher is None else taught_advantages(samples, config.distillation)
    if record is not None:
        samples = record.numbered(samples, trainer.dp_rank)
    seed = sampling_seed(config.run.seed, "order", session.step, trainer.dp_rank)
    for result in updater.run(samples, seed, clock, guard, parts):
        counts = result.skipped and not result.has_lower_scale
        session.skipped_in_a_row = session.skipped_in_a_row + 1 if counts else 0
        results.append(result)
    if config.reward.kl_coef:
        own |= kl_metrics(samples, config.reward, trainer.groups)
    if own:
        results[0] = replace(results[0], metrics={**results[0].metrics, **own})
    return results


def first_update_guard(session: Updating, collected: Collected) -> FirstUpdateGuard:
    """The guard of this step's first update; a collective over all ranks."""
    local = {
        "dropped": dropped_tokens(collected.groups),
        "oldest": Metric(max(collected.token_ages, default=0), kind="max"),
    }
    found = reduce_over_samples(session.groups, local)
    config = session.config
    on_policy = found["oldest"] == 0
    return FirstUpdateGuard.of(
        config.train, config.rollout, config.model, dropped=found["dropped"], on_policy=on_policy
    )


def publish(session: Session) -> None:
    """Give the current weights to the engine, which has the GPUs then; every rank takes part in gathering them."""
    for note in session.gpus.for_sampling():
        session.console.say(f"servers  {note}")


def save_due(session: Session) -> bool:
    """Whether this step ends with a checkpoint."""
    every = session.config.checkpoint.save_every
    last = session.step == session.config.run.num_steps
    return last or session.is_solved or bool(every and session.step % every == 0)


def check_health(session: Session) -> None:
    """Stop when no update could be applied several times in a row.

    Raises:
        TrainingStopped: after ``train.max_skipped_updates`` non-finite gradients; the weights were saved.
    """
    limit = session.config.train.max_skipped_updates
    if session.skipped_in_a_row < limit:
        return
    save_session(session)
    finish_save(session, wait=True)
    raise TrainingStopped(
        f"the gradient was not finite in {session.skipped_in_a_row} updates in a row (train.max_skipped_updates = "
        f"{limit}); none of them was applied, and the weights were saved. Look at train/ratio_max, "
        f"train/prob_rise_max and train/grad_norm in {session.folder / 'metrics.jsonl'}: a rollout engine whose "
        "log-probabilities do not fit the weights, a learning rate that is too high, and bf16 overflow are usual causes"
    )
