"""Training loop: collect rollouts, update the policy, publish weights, evaluate, log, save.

Every rank runs this loop. Almost every call in it is a collective, so all ranks take the same branches.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from megatron_dppo.config.schema import Config
from megatron_dppo.errors import TrainingStopped, UserError
from megatron_dppo.process.orphans import no_orphans, stop_when_torchrun_dies
from megatron_dppo.process.stop_signal import Stopped, StopSignal
from megatron_dppo.process.time_limit import TimeLimit
from megatron_dppo.report.clock import PROGRESS, Clock
from megatron_dppo.report.console import Console
from megatron_dppo.run.run_records import Records
from megatron_dppo.run.run_state import RunState
from megatron_dppo.run.save_plan import SavePlan
from megatron_dppo.run.session import Session, open_session
from megatron_dppo.setup.failed_functions import failed_keys, record_failed_functions


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
                with _recorded_failures(session.records, session.state):
                    train_steps(session, stop, limit)
        except Stopped as reason:
            # The session's console is closed, so this line needs one of its own.
            Console(enabled=os.environ["RANK"] == "0" and config.log.progress).print(f"stopped  {reason}")
            return reason.exit_code
    return 0


@contextmanager
def _recorded_failures(records: Records, state: RunState) -> Iterator[None]:
    """Record that user functions stopped the run, so that the next start accepts repaired ones."""
    try:
        yield
    except UserError as error:
        # Without a collective: a function may fail on one rank alone, while the others wait for it.
        if keys := failed_keys(error):
            records.check_folder()
            with suppress(OSError):
                record_failed_functions(records.folder, state.step, keys)
        raise


def train_steps(session: Session, stop: StopSignal, limit: TimeLimit) -> None:
    """Train until the last step, the target accuracy, a signal or the time limit, then export the model."""
    config = session.config
    state = session.state
    session.collector.begin()
    # A resume repeats the evaluation that ran beside training when the checkpoint was saved.
    if state.step == 0 or state.evaluation_due:
        session.evaluator.begin(state.step)
    if stop.requested():
        raise Stopped(f"by {stop.name} before the next step. Rerun the same command to resume")
    session.records.begin_training(state.step)
    while state.step < config.run.num_steps and not state.has_reached(config.eval.stop_at_accuracy):
        is_evaluating = config.eval.is_due(state.step + 1, config.run.num_steps)
        with limit.step(evaluates=is_evaluating):
            metrics = _step(session, is_evaluating=is_evaluating)
            plan = SavePlan.decide(config, state, metrics, session.checkpoints, limit, stop)
            plan.carry_out(session.checkpoints, state)
    session.checkpoints.export()
    session.records.summarize(state.best, session.trainer.policy_version, session.evaluator.responses_before)


def _step(session: Session, *, is_evaluating: bool) -> dict[str, float]:
    """Do one step and log its metrics: collect, train, publish, evaluate.

    An evaluation beside training has no metrics here; ``Evaluator.finish`` logs them.
    """
    state = session.state
    PROGRESS.enter("loop", state.step)
    clock = Clock()

    # Collect: the engine samples, the reward functions score.
    batch = session.collector.collect(state.step, clock)

    # Train: one optimizer update per mini-batch. The engine may already sample the next step beside it.
    try:
        results = session.updater.step(batch, clock, state=state)
    except TrainingStopped:
        # The step's metrics will not be logged, and its broken contracts may have the same cause.
        session.collector.take_counts()
        raise
    # The engine must be able to get new weights, and an evaluation that started after the previous update needs the
    # old ones.
    session.collector.end_update(batch, state.guard, clock)
    session.evaluator.finish()
    state.step += 1

    # Publish: the engine gets the new weights.
    session.collector.publish(clock, samples_next=is_evaluating)
    requests = session.collector.take_request_metrics()

    metrics = session.records.measure(batch.collected, batch.samples, results, clock, requests)
    if is_evaluating:
        metrics |= session.evaluator.evaluate(state.step)
    session.records.log_step(state.step, metrics, batch.collected.groups)
    return metrics
