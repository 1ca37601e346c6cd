"""What is logged of a step, and what a run leaves behind at its end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from megatron_dppo.clock import Clock
from megatron_dppo.evaluation import prefixed, read_answers, reduce_over_samples
from megatron_dppo.platform import DTYPES
from megatron_dppo.report.curves import write_curves
from megatron_dppo.report.summary import before_after_table, sample_answers, summarize, written_files
from megatron_dppo.rollout.collect import rollout_metrics
from megatron_dppo.rollout.pool import PoolCounts
from megatron_dppo.rollout.server_engine import ServerEngine
from megatron_dppo.sampling import Collected
from megatron_dppo.session import Session, export_hf
from megatron_dppo.types import Metric, StepResult, TrainingSample


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
    rollout = reduce_over_samples(session, local)
    # A denominator of 1 / dp a rank sums to 1: the value is the sum over the ranks, not a mean.
    tokens = reduce_over_samples(session, {"tokens": Metric(sum(s.num_tokens for s in samples), 1 / dp)})
    train = {
        name: max(r.metrics[name] for r in results)
        if name.endswith("_max")
        else _mean(r.metrics[name] for r in results)
        for name in results[0].metrics
    } | {
        # Before the first update pi and mu have the same weights: what differs is the engine.
        "abs_prob_diff_first": results[0].metrics["abs_prob_diff"],
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


def _server_metrics(session: Session, dp: int) -> dict[str, Metric]:
    """What happened to the requests of this step (sums over the ranks); empty without servers."""
    if session.config.rollout.engine == "local":
        return {}
    counts = session.engine.take_counts() if isinstance(session.engine, ServerEngine) else PoolCounts()
    return {
        "retried_requests": Metric(counts.retries, 1 / dp),
        "lost_servers": Metric(counts.servers_lost, kind="max"),
    }


def _sources(train: str | list[str]) -> str:
    return train if isinstance(train, str) else ", ".join(train)


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def log(session: Session, values: dict[str, float]) -> None:
    """One record to every sink, one line to the terminal."""
    if session.writer is not None:
        session.writer.write(session.step, values)
    if session.step > 0:
        session.console.step(session.step, session.config.run.num_steps, values)
    elif values:
        session.console.say(f"held-out accuracy before training: {values['eval/accuracy']:.3f}")


def finish(session: Session) -> None:
    """Export the model, draw the curves, print what changed."""
    config, folder, console = session.config, session.folder, session.console
    if config.checkpoint.export_hf:
        export_hf(session.trainer, config, folder / "hf", DTYPES[config.model.dtype])
    if session.writer is None:
        return
    summarize(
        folder,
        world_size=session.inputs.layout.world_size,
        layout=str(session.inputs.layout),
        policy_updates=session.trainer.policy_version,
        total_seconds=time.time() - session.started,
    )
    write_curves(session.writer.path, folder / "curves.png", f"{config.loss.name} on {_sources(config.data.train)}")
    console.finish()
    console.say("\n" + before_after_table(folder))
    after = read_answers(session)
    if session.answers_before and after:
        console.say("\nheld-out problems\n" + sample_answers(session.answers_before, after))
    console.say("\nwritten\n" + written_files(folder))
