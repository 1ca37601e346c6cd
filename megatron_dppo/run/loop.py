"""The run: collect, train, publish, log, evaluate, save. Every rank runs the same loop."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_dppo.config.schema import Config
from megatron_dppo.errors import TrainingStopped
from megatron_dppo.report.clock import PROGRESS, Clock
from megatron_dppo.report.console import Console
from megatron_dppo.run.export import export_results
from megatron_dppo.run.orphans import no_orphans, stop_when_torchrun_dies
from megatron_dppo.run.run_records import request_metrics, step_metrics
from megatron_dppo.run.session import Session, open_session
from megatron_dppo.run.step import make_samples, update_policy
from megatron_dppo.run.stop_signal import Stopped, StopSignal


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
        samples = make_samples(collected.groups, config.train)
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
        requests = request_metrics(session.engine, has_servers=config.rollout.engine != "local", dp=dp)
        values = step_metrics(session.groups, collected, samples, results, clock, requests, dp=dp)
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
        export_results(trainer, session.inputs, config)
        records.summarize(trainer.policy_version, evaluator.answers_before)


def _stuck(skipped: int, config: Config) -> TrainingStopped:
    return TrainingStopped(
        f"the gradient was not finite in {skipped} updates in a row (train.max_skipped_updates = "
        f"{config.train.max_skipped_updates}); none of them was applied, and the weights were saved. Look at "
        f"train/ratio_max, train/prob_rise_max and train/grad_norm in {Path(config.run.output_dir) / 'metrics.jsonl'}: "
        "a rollout engine whose log-probabilities do not fit the weights, a learning rate that is too high, and bf16 "
        "overflow are usual causes"
    )
