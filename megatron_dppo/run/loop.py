"""Training loop: collect rollouts, update the policy, publish weights, evaluate, log, save.

Every rank runs this loop. Almost every call in it is a collective, so all ranks take the same branches.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_dppo.config.schema import Config
from megatron_dppo.errors import TrainingStopped, UserError
from megatron_dppo.process.orphans import no_orphans, stop_when_torchrun_dies
from megatron_dppo.process.stop_signal import Stopped, StopSignal
from megatron_dppo.process.time_limit import TimeLimit
from megatron_dppo.report.clock import PROGRESS, Clock
from megatron_dppo.report.console import Console
from megatron_dppo.rollout.batch import CollectedRollouts
from megatron_dppo.run.export import export_results
from megatron_dppo.run.gpus import exclude_servers
from megatron_dppo.run.run_records import first_agent_error, request_metrics, step_metrics, take_counts, token_ranks
from megatron_dppo.run.save_plan import SavePlan
from megatron_dppo.run.session import Session, open_session
from megatron_dppo.run.step import StepBatch, make_samples
from megatron_dppo.setup.failed_functions import failed_keys, record_failed_functions
from megatron_dppo.types import StepResult, TrainingSample


def run(config: Config) -> int:
    """Train with ``config`` and return the exit code.

    The code is 0, also when a signal stopped the run after it saved a checkpoint. The job's time limit gives 6.
    """
    limit = TimeLimit.from_environment(os.environ)
    with no_orphans(), StopSignal() as stop:
        stop_when_torchrun_dies()
        try:
            with open_session(config) as session:
                session.begin()
                # From here on a signal lets the current step end and be saved.
                stop.deferring = True
                with _recorded_failures(session):
                    train_steps(session, stop, limit)
        except Stopped as reason:
            # The session's console is closed, so this line needs one of its own.
            Console(enabled=os.environ["RANK"] == "0" and config.log.progress).print(f"stopped  {reason}")
            return reason.exit_code
    return 0


@contextmanager
def _recorded_failures(session: Session) -> Iterator[None]:
    """Record that user functions stopped the run, so that the next start accepts repaired ones."""
    try:
        yield
    except UserError as error:
        # Without a collective: a function may fail on one rank alone, while the others wait for it.
        if keys := failed_keys(error):
            session.check_folder()
            with suppress(OSError):
                record_failed_functions(Path(session.config.run.output_dir), session.state.step, keys)
        raise


def train_steps(session: Session, stop: StopSignal, limit: TimeLimit) -> None:
    """Train until the last step, the target accuracy, a signal or the time limit, then export the model."""
    config = session.config
    state = session.state
    _evaluate_before_training(session)
    if stop.requested():
        raise Stopped(f"by {stop.name} before the next step. Rerun the same command to resume")
    session.records.console.start("training", config.run.num_steps, state.step)
    while state.step < config.run.num_steps and not state.has_reached(config.eval.stop_at_accuracy):
        PROGRESS.enter("loop", state.step)
        limit.begin_step()
        is_evaluating = config.eval.is_due(state.step + 1, config.run.num_steps)
        metrics = _step(session, is_evaluating=is_evaluating)
        plan = SavePlan.decide(config, state, metrics, session.checkpoints, limit, stop)
        _save(session, plan)
        if plan.reason_to_stop is not None:
            raise plan.reason_to_stop
        limit.end_step(has_evaluated=is_evaluating)
    _finish(session)


def _evaluate_before_training(session: Session) -> None:
    """Evaluate, or repeat the evaluation that ran beside training when the checkpoint was saved."""
    state = session.state
    with PROGRESS.part("publish"):
        session.records.show_servers(session.gpus.for_sampling())
    if state.step == 0 or state.evaluation_due:
        session.records.log(state.step, session.evaluator.evaluate(state.step))


def _step(session: Session, *, is_evaluating: bool) -> dict[str, float]:
    """Do one step and log its metrics: collect, train, publish, evaluate."""
    config = session.config
    state = session.state
    gpus = session.gpus
    records = session.records
    clock = Clock()

    # Collect: the engine samples, the reward functions score.
    with clock.part("publish"):
        records.show_servers(gpus.for_sampling())
    collected = session.stream.collect(state.step, session.trainer.policy_version, clock)
    samples = make_samples(collected.groups, config.train, config.reward, has_teacher=config.distillation.is_enabled)

    # Train: one optimizer update per mini-batch. `collect` may already sample the next step beside it.
    with clock.part("publish"):
        records.show_servers(gpus.for_training())
    state.guard.history.probed |= gpus.probed
    record = session.recorder.begin(state.step + 1)
    try:
        batch = StepBatch(state.step, collected, samples, token_ranks(session.engine))
        results = session.updater.step(batch, clock, guard_state=state.guard, record=record)
    except TrainingStopped:
        # The step's metrics will not be logged, and its broken contracts may have the same cause.
        take_counts(session.engine)
        raise
    records.show_servers(exclude_servers(gpus, state.guard))
    state.count_skipped(results)

    # Wait until the engine can get new weights: for rollouts of the next step, unless they may change weights
    # in mid-response, and for an evaluation that started after the previous update.
    session.stream.wait_before_update(clock)
    finished_evaluation = session.evaluator.finish()
    if finished_evaluation is not None:
        records.log(*finished_evaluation)
    state.step += 1
    session.check_folder()
    if record is not None:
        with clock.part("record"):
            session.recorder.write(state.step, record, collected, records.writer)

    # Publish: the engine gets the new weights. Colocated servers that would sleep again at once are left asleep.
    with clock.part("publish"):
        records.show_servers(gpus.after_update(samples_next=is_evaluating))
    return _log_step(session, collected, samples, results, clock, is_evaluating=is_evaluating)


def _log_step(
    session: Session,
    collected: CollectedRollouts,
    samples: Sequence[TrainingSample],
    results: Sequence[StepResult],
    clock: Clock,
    *,
    is_evaluating: bool,
) -> dict[str, float]:
    """Evaluate if that is due, and log the metrics of a step.

    An evaluation beside training returns no metrics here; ``Evaluator.finish`` does later.
    """
    config = session.config
    dp = session.inputs.layout.dp
    requests = request_metrics(session.engine, has_servers=config.rollout.engine != "local", dp=dp)
    metrics = step_metrics(
        session.groups, collected, samples, results, clock, requests, dp=dp, sources=config.data.sources
    )
    if is_evaluating:
        metrics |= session.evaluator.evaluate(session.state.step)
    session.check_folder()
    agents_failed = metrics.get("rollout/agent/failed_fraction", 0.0)
    agent_error = first_agent_error(collected.groups, agents_failed, session.groups.world)
    session.records.log(session.state.step, metrics, agent_error)
    return metrics


def _save(session: Session, plan: SavePlan) -> None:
    """Write the checkpoint that is due, and report the previous one if it is complete."""
    checkpoints = session.checkpoints
    if plan.is_due or plan.is_due_by_time:
        with PROGRESS.part("save"), checkpoints.timer.measure(by_time=not plan.is_due):
            session.records.show_servers(session.gpus.for_training())
            if plan.is_due:
                checkpoints.save(session.state, session.evaluator)
            else:
                checkpoints.save_by_time(session.state, session.evaluator)
    checkpoints.finish(wait=plan.reason_to_stop is not None)


def _finish(session: Session) -> None:
    """Wait for the last checkpoint, export the model, write the summary."""
    config = session.config
    state = session.state
    records = session.records
    session.checkpoints.finish(wait=True)
    session.check_folder()
    if state.best is not None and state.has_reached(config.eval.stop_at_accuracy):
        accuracy, step = state.best
        records.console.print(
            f"solved   eval/accuracy {accuracy:.3f} at step {step} reached eval.stop_at_accuracy = "
            f"{config.eval.stop_at_accuracy}"
        )
    with PROGRESS.part("export"):
        records.show_servers(session.gpus.for_training())
        export_results(session.trainer, session.inputs, config)
        records.summarize(session.trainer.policy_version, session.evaluator.responses_before)
