"""What is logged of a step, and what a run leaves behind at its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from megatron_dppo.files.disk import disk_errors, require_space
from megatron_dppo.parallel.objects import agreed
from megatron_dppo.platform import DTYPES
from megatron_dppo.report.clock import Clock
from megatron_dppo.report.curves import write_curves
from megatron_dppo.report.summary import before_after_table, sample_answers, summarize, written_files
from megatron_dppo.rollout.collect import rollout_metrics
from megatron_dppo.rollout.pool import PoolCounts
from megatron_dppo.rollout.server_engine import ServerEngine
from megatron_dppo.run.evaluation import prefixed, read_answers, reduce_over_samples
from megatron_dppo.run.export import export_adapter, export_hf
from megatron_dppo.run.session import Session
from megatron_dppo.run.stream.collected import Collected
from megatron_dppo.types import Metric, StepResult, TrainingSample

_SHOWN_MESSAGES = 8
"""of broken contracts and lost servers, a step and rank"""
_RECORD_BYTES = 1_000_000
"""Far more than a step's records take."""


def step_metrics(
    session: Session,
    collected: Collected,
    samples: Sequence[TrainingSample],
    results: Sequence[StepResult],
    clock: Clock,
) -> dict[str, float]:
    """Everything that is logged for a step, globally reduced."""
    dp = session.inputs.layout.dp
    local = rollout_metrics(collected.groups, samples) | collected.metrics(dp) | _server_metrics(session, dp)
    rollout = reduce_over_samples(session.groups, local)
    # A denominator of 1 / dp a rank sums to 1: the value is the sum over the ranks, not a mean.
    tokens = reduce_over_samples(session.groups, {"tokens": Metric(sum(s.num_tokens for s in samples), 1 / dp)})
    # Before the first update pi and mu have the same weights: what differs is the engine.
    first = {f"{name}_first": value for name, value in results[0].metrics.items() if name == "abs_prob_diff"}
    train = over_updates([result.metrics for result in results]) | first
    train |= {
        "grad_norm": _mean(r.grad_norm for r in results),
        "learning_rate": results[-1].learning_rate,
        "skipped_updates": float(sum(r.skipped for r in results)),
        "policy_version": float(results[-1].policy_version),
    }
    seconds = clock.total()
    perf = {f"{name}_seconds": value for name, value in clock.parts.items()} | {
        "step_seconds": seconds,
        # What the loop itself costs: everything but the parts above.
        "overhead_seconds": seconds - sum(clock.parts.values()),
        "tokens": tokens["tokens"],
        "tokens_per_second": tokens["tokens"] / seconds,
    }
    return prefixed("train", train) | prefixed("rollout", rollout) | prefixed("perf", perf)


def over_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The largest or the mean of each metric over the updates that have it."""
    found: dict[str, list[float]] = {}
    for metrics in updates:
        for name, value in metrics.items():
            found.setdefault(name, []).append(value)
    return {name: max(values) if name.endswith("_max") else _mean(values) for name, values in found.items()}


def _server_metrics(session: Session, dp: int) -> dict[str, Metric]:
    """What happened to the requests of this step (sums over the ranks); empty without servers."""
    if session.config.rollout.engine == "local":
        return {}
    counts = session.engine.take_counts() if isinstance(session.engine, ServerEngine) else PoolCounts()
    # Of every rank, not of the one that shows: each sees the answers to its own requests.
    for message in counts.messages[:_SHOWN_MESSAGES]:
        print(f"servers  {message}", file=sys.stderr, flush=True)
    return {
        "retried_requests": Metric(counts.retries, 1 / dp),
        "lost_servers": Metric(counts.servers_lost, kind="max"),
        "breaches": Metric(counts.breaches, 1 / dp),
    }


def _sources(train: str | list[str]) -> str:
    return train if isinstance(train, str) else ", ".join(train)


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def log(session: Session, step: int, values: dict[str, float]) -> None:
    """One record of a step to every sink, one line to the terminal; a collective. Nothing where there are no values.

    Raises:
        DiskError: on all ranks, when it cannot be written: without its record a run does not go on.
    """

    if not values:
        return

    def write() -> None:
        if session.writer is not None:
            # TensorBoard writes in a thread of its own, whose failure would be a traceback.
            require_space(session.writer.path, _RECORD_BYTES, "the log of a step")
            with disk_errors(session.writer.path, "the metrics"):
                session.writer.write(step, values)

    agreed(write, session.groups.world)
    if "rollout/reward" in values:
        session.console.step(step, session.config.run.num_steps, values)
        if session.writer is not None:
            for text in session.alarms.see(values):
                print(f"warning  {text}", file=sys.stderr, flush=True)
    elif "eval/accuracy" in values:
        when = f"of step {step}" if step else "before training"
        session.console.show(values)
        session.console.say(f"held-out {session.config.reward.evaluated} {when}: {values['eval/accuracy']:.3f}")


def finish(session: Session) -> None:
    """Export the model and its adapters, draw the curves, print what changed."""
    config = session.config
    if config.checkpoint.export_hf:
        export_hf(session.trainer, session.inputs, config, session.folder / "hf", DTYPES[config.model.dtype])
    if config.lora.rank:
        export_adapter(session.trainer, config, session.folder / "hf-adapter")
    agreed(lambda: _summarize(session), session.groups.world)


def _summarize(session: Session) -> None:
    """Summary and curves, on the rank that has the metrics."""
    folder, console = session.folder, session.console
    if session.writer is None:
        return
    with disk_errors(folder, "the summary"):
        _write_summary(session, session.writer.path)
    console.finish()
    console.say("\n" + before_after_table(folder, session.config.reward.evaluated))
    after = read_answers(session)
    if session.answers_before and after:
        console.say("\nheld-out problems\n" + sample_answers(session.answers_before, after))
    console.say("\nwritten\n" + written_files(folder))


def _write_summary(session: Session, metrics: Path) -> None:
    config, folder = session.config, session.folder
    summarize(
        folder,
        world_size=session.inputs.layout.world_size,
        layout=str(session.inputs.layout),
        policy_updates=session.trainer.policy_version,
        total_seconds=time.time() - session.started,
    )
    if config.log.curves:
        write_curves(metrics, folder / "curves.png", f"{config.loss.name} on {_sources(config.data.train)}")
