"""Training loop: collect rollouts, update the policy, publish weights, evaluate, log, save.

Every rank runs this loop. Almost every call in it is a collective, so all ranks take the same branches.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_dppo.config.schema import Config
from megatron_dppo.errors import TrainingStopped, UserError
from megatron_dppo.report.clock import PROGRESS, Clock
from megatron_dppo.report.console import Console
from megatron_dppo.run.export import export_results
from megatron_dppo.run.failed_functions import (
    AGENT_KEYS,
    REWARD_KEYS,
    FunctionsFailed,
    failed_keys,
    record_failed_functions,
)
from megatron_dppo.run.gpus import exclude_servers
from megatron_dppo.run.orphans import no_orphans, stop_when_torchrun_dies
from megatron_dppo.run.run_records import first_agent_error, request_metrics, step_metrics, take_counts, token_ranks
from megatron_dppo.run.session import Session, open_session
from megatron_dppo.run.step import make_samples, update_policy
from megatron_dppo.run.stop_signal import Stopped, StopSignal
from megatron_dppo.run.time_limit import TimeLimit


def run(config: Config) -> int:
    """Train with ``config`` and return the exit code.

    The code is 0, also when a signal stopped the run after it saved a checkpoint. The job's time limit gives 6.
    """
    limit = TimeLimit.from_environment(os.environ)
    with no_orphans(), StopSignal() as stop:
        stop_when_torchrun_dies()
        try:
            with open_session(config, stop) as session:
                session.begin()
                # From here on a signal lets the current step end and be saved.
                stop.deferring = True
                with _recorded_failures(session):
                    _train(session, stop, limit)
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


def _train(session: Session, stop: StopSignal, limit: TimeLimit) -> None:
    """Train until the last step, the target accuracy, a signal or the time limit, then export the model."""
    config = session.config
    state = session.state
    trainer = session.trainer
    stream = session.stream
    gpus = session.gpus
    evaluator = session.evaluator
    checkpoints = session.checkpoints
    records = session.records
    recorder = session.recorder
    dp = session.inputs.layout.dp

    # Evaluate before training, or repeat the evaluation that ran beside training when the checkpoint was saved.
    with PROGRESS.part("publish"):
        records.show_servers(gpus.for_sampling())
    if state.step == 0 or state.evaluation_due:
        records.log(state.step, evaluator.evaluate(state.step))
    if stop.requested():
        raise Stopped(f"by {stop.name} before the next step. Rerun the same command to resume")

    records.console.start("training", config.run.num_steps, state.step)
    while state.step < config.run.num_steps and not state.has_reached(config.eval.stop_at_accuracy):
        PROGRESS.enter("loop", state.step)
        limit.begin_step()
        clock = Clock()

        # Collect: the engine samples, the reward functions score.
        with clock.part("publish"):
            records.show_servers(gpus.for_sampling())
        collected = stream.collect(state.step, trainer.policy_version, clock)
        samples = make_samples(
            collected.groups, config.train, config.reward, has_teacher=config.distillation.is_enabled
        )

        # Train: one optimizer update per mini-batch. `collect` may already sample the next step beside it.
        with clock.part("publish"):
            records.show_servers(gpus.for_training())
        state.guard.history.probed |= gpus.probed
        record = recorder.begin(state.step + 1)
        try:
            results = update_policy(
                trainer,
                config,
                session.teacher,
                state.step,
                collected,
                samples,
                clock,
                record,
                guard_state=state.guard,
                ranks=token_ranks(session.engine),
            )
        except TrainingStopped:
            # The step's metrics will not be logged, and its broken contracts may have the same cause.
            take_counts(session.engine)
            raise
        records.show_servers(exclude_servers(gpus, state.guard))
        state.count_skipped(results)

        # Wait until the engine can get new weights: for rollouts of the next step, unless they may change weights
        # in mid-response, and for an evaluation that started after the previous update.
        stream.wait_before_update(clock)
        finished_evaluation = evaluator.finish()
        if finished_evaluation is not None:
            records.log(*finished_evaluation)
        state.step += 1
        session.check_folder()
        if record is not None:
            with clock.part("record"):
                recorder.write(state.step, record, collected, records.writer)

        # Publish: the engine gets the new weights. Colocated servers that would sleep again at once are left asleep.
        is_evaluating = config.eval.is_due(state.step, config.run.num_steps)
        with clock.part("publish"):
            records.show_servers(gpus.after_update(samples_next=is_evaluating))

        # Log and evaluate. An evaluation beside training returns no metrics here; `evaluator.finish` does later.
        requests = request_metrics(session.engine, has_servers=config.rollout.engine != "local", dp=dp)
        metrics = step_metrics(
            session.groups, collected, samples, results, clock, requests, dp=dp, sources=config.data.sources
        )
        if is_evaluating:
            metrics |= evaluator.evaluate(state.step)
        session.check_folder()
        agents_failed = metrics.get("rollout/agent/failed_fraction", 0.0)
        records.log(state.step, metrics, first_agent_error(collected.groups, agents_failed, session.groups.world))

        # Save. `stop.requested` is a collective: all ranks agree on whether to stop after this step.
        has_next = state.step < config.run.num_steps
        evaluates_next = config.eval.is_due(state.step + 1, config.run.num_steps)
        if has_next and limit.leaves_no_step(save_seconds=checkpoints.save_seconds, evaluates_next=evaluates_next):
            stop.request_by_time_limit()
        is_stopping = stop.requested()
        is_stuck = state.skipped_in_a_row >= config.train.max_skipped_updates
        is_best = state.is_new_best(metrics.get("eval/accuracy")) and config.checkpoint.keep_best
        failures_error = _failures_error(state.step, metrics, config)
        is_last_save = is_stopping or is_stuck or failures_error is not None
        is_due = is_best or is_last_save or checkpoints.is_due(state)
        is_due_by_time = checkpoints.is_due_by_time()
        if is_due or is_due_by_time:
            with PROGRESS.part("save"), checkpoints.timer.measure(by_time=not is_due):
                records.show_servers(gpus.for_training())
                if is_due:
                    checkpoints.save(state, evaluator)
                else:
                    checkpoints.save_by_time(state, evaluator)
        checkpoints.finish(wait=is_last_save)
        if is_stuck:
            raise _stuck_error(state.skipped_in_a_row, config)
        if failures_error is not None:
            raise failures_error
        if is_stopping:
            raise Stopped(
                f"by {stop.name} after step {state.step}. Rerun the same command to resume", exit_code=stop.exit_code
            )
        limit.end_step(has_evaluated=is_evaluating)

    # Finish: wait for the last checkpoint, export the model, write the summary.
    checkpoints.finish(wait=True)
    session.check_folder()
    if state.best is not None and state.has_reached(config.eval.stop_at_accuracy):
        accuracy, step = state.best
        records.console.print(
            f"solved   eval/accuracy {accuracy:.3f} at step {step} reached eval.stop_at_accuracy = "
            f"{config.eval.stop_at_accuracy}"
        )
    with PROGRESS.part("export"):
        records.show_servers(gpus.for_training())
        export_results(trainer, session.inputs, config)
        records.summarize(trainer.policy_version, evaluator.responses_before)


def _failures_error(step: int, metrics: Mapping[str, float], config: Config) -> TrainingStopped | None:
    """Return the error of a step in which too many rewards or agents failed, and more than one; None otherwise."""
    agents = metrics.get("rollout/agent/failed_fraction", 0.0)
    # The rewards of failed episodes count as failed, too.
    rewards = metrics["rollout/reward_failed_fraction"] - agents
    num_rollouts = config.rollout.prompts_per_step * config.rollout.samples_per_prompt

    def is_too_much(fraction: float, limit: float) -> bool:
        return fraction > limit and fraction * num_rollouts > 1.5

    if is_too_much(rewards, config.reward.max_failed_fraction):
        return FunctionsFailed(
            f"{rewards:.0%} of the rewards of step {step} failed, more than reward.max_failed_fraction = "
            f"{config.reward.max_failed_fraction:g}. The weights were saved. A warning above shows the first error. "
            "Fix the reward and rerun the same command to resume, or raise the limit",
            REWARD_KEYS,
        )
    if is_too_much(agents, config.agent.max_failed_fraction):
        return FunctionsFailed(
            f"{agents:.0%} of the agent's episodes of step {step} failed, more than agent.max_failed_fraction = "
            f"{config.agent.max_failed_fraction:g}. The weights were saved. The line of the step shows the first "
            "error. Fix the agent and rerun the same command to resume, or raise the limit",
            AGENT_KEYS,
        )
    return None


def _stuck_error(skipped: int, config: Config) -> TrainingStopped:
    """Return the error of a run whose updates are all skipped."""
    metrics = Path(config.run.output_dir) / "metrics.jsonl"
    return TrainingStopped(
        f"the gradient was not finite in {skipped} updates in a row (train.max_skipped_updates = "
        f"{config.train.max_skipped_updates}). None of them was applied, and the weights were saved. Check "
        f"train/ratio_max, train/prob_rise_max and train/grad_norm in {metrics}. Usual causes: rollout "
        "log-probabilities that do not fit the weights, a learning rate that is too high (to resume with a lower one: "
        "--optimizer.lr VALUE --allow-changed optimizer.lr), or overflow"
    )
