"""Records of a run: its start, the metrics of each step, and what it leaves at its end."""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_dppo.config.data import source_metric
from megatron_dppo.config.layout import Layout
from megatron_dppo.config.schema import Config
from megatron_dppo.files import MAKE_ROOM, disk_errors, require_space
from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.parallel.objects import gather_objects, run_on_leader
from megatron_dppo.process.lock import FolderLock
from megatron_dppo.report.clock import Clock
from megatron_dppo.report.console import Console
from megatron_dppo.report.curves import write_curves
from megatron_dppo.report.findings import LearningWarnings
from megatron_dppo.report.metrics import MetricsWriter, add_prefix, reduce_over_samples
from megatron_dppo.report.records import (
    before_after_table,
    compare_responses,
    list_output_files,
    metric_problem,
    missing_records,
    read_metrics,
    set_damaged_lines_aside,
    summarize,
)
from megatron_dppo.report.steps.files import delete_steps_after
from megatron_dppo.rewards.item import MAX_PARTS
from megatron_dppo.rollout.batch import CollectedRollouts
from megatron_dppo.run.evaluation import SAMPLES, read_sample_responses, sample_problem
from megatron_dppo.setup.changes import Change
from megatron_dppo.setup.contents import Contents
from megatron_dppo.setup.resume import ResumePoint
from megatron_dppo.setup.run_folder import UNSAVED, set_metrics_aside
from megatron_dppo.setup.starts import changes_since_last_start, record_start
from megatron_dppo.types import FinishReason, Metric, Rollout, RolloutGroup, StepResult, TrainingSample

_RECORD_BYTES = 1_000_000
"""Far more than a step's records take."""


def reduce_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each metric's mean over the updates that have it. Metrics named ``*_max`` get their maximum."""
    values_by_name: dict[str, list[float]] = {}
    for metrics in updates:
        for name, value in metrics.items():
            values_by_name.setdefault(name, []).append(value)
    return {name: max(values) if name.endswith("_max") else _mean(values) for name, values in values_by_name.items()}


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


class Records:
    """Reports of a run: metrics to files and trackers, lines to the console, a summary at the end."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        groups: ParallelGroups,
        console: Console,
        lock: FolderLock | None,
        started: float,
    ) -> None:
        self._config = config
        self._layout = layout
        self._groups = groups
        self._lock = lock
        self._started = started
        self._warnings = LearningWarnings(has_reward_signal=not config.distillation.is_enabled)
        self.folder = Path(config.run.output_dir)
        self.console = console
        self.writer: MetricsWriter | None = None
        """None on all ranks but 0, and before ``open``."""

    def check_folder(self) -> None:
        """End this process if the run's folder is no longer its own. Call it before each write to the folder."""
        if self._lock is not None:
            self._lock.exit_if_lost()

    def begin(self, point: ResumePoint | None, step: int, contents: Contents) -> None:
        """Record this start and open the metrics, without records of later steps than ``step``; a collective.

        Args:
            point: Checkpoint that the run resumes from, if any.
            step: Step of that checkpoint, or 0.
            contents: Files of the configuration, on rank 0.
        """
        folder = self.folder
        say = self.console.print
        for note in run_on_leader(lambda: set_damaged_logs_aside(folder), self._groups.world):
            say(note)
        changes: Sequence[Change] = () if point is None else point.changes
        if point is not None and (note := missing_records(folder, step)):
            say(note)
        if point is None and (before := read_metrics(folder / "metrics.jsonl")):
            changes = changes_since_last_start(folder, self._config, contents)
            say(
                f"note     an earlier start in this folder reached step {before[-1]['step']} and left no checkpoint: "
                f"this one begins at step 0\n         the earlier metrics are in {UNSAVED}/"
            )
            for change in changes:
                say(f"         changed: {change}")

        def write() -> str:
            if point is None:
                set_metrics_aside(folder)
            # Recorded steps after the checkpoint are those of an attempt whose updates are lost.
            delete_steps_after(folder, step)
            return record_start(
                folder,
                self._config,
                world_size=self._layout.world_size,
                layout=str(self._layout),
                resumed_step=None if point is None else step,
                changes=[str(change) for change in changes],
                contents=contents,
            )

        if note := run_on_leader(write, self._groups.world):
            say(note)
        self.open(step or None)

    def open(self, resumed_step: int | None) -> None:
        """Open the metrics' files and trackers on rank 0; records of steps after ``resumed_step`` are dropped."""
        if dist.get_rank() != 0:
            return
        config = self._config
        self.writer = MetricsWriter(self.folder, config.model_dump(), config.log, resumed_step=resumed_step)

    def begin_training(self, step: int) -> None:
        """Show the progress of the steps after this one."""
        self.console.start("training", self._config.run.num_steps, step)

    def measure(
        self,
        collected: CollectedRollouts,
        samples: Sequence[TrainingSample],
        results: Sequence[StepResult],
        clock: Clock,
        requests: dict[str, Metric],
    ) -> dict[str, float]:
        """Return the metrics of a step, reduced over all ranks; a collective."""
        dp = self._layout.dp
        local = rollout_metrics(collected.groups, samples) | collected.metrics(dp) | requests
        local |= source_metrics(collected.groups, self._config.data.sources)
        rollout = reduce_over_samples(self._groups, local)
        # A denominator of 1 / dp a rank sums to 1: the value is the sum over the ranks, not a mean.
        tokens = reduce_over_samples(self._groups, {"tokens": Metric(sum(s.num_tokens for s in samples), 1 / dp)})
        # Before the first update pi and mu have the same weights: what differs is the engine.
        first = {f"{name}_first": value for name, value in results[0].metrics.items() if name == "abs_prob_diff"}
        train = reduce_updates([result.metrics for result in results]) | first
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
        return add_prefix("train", train) | add_prefix("rollout", rollout) | add_prefix("perf", perf)

    def log_step(self, step: int, metrics: dict[str, float], groups: Sequence[RolloutGroup]) -> None:
        """Log a step with the first error of its failed episodes, if any; a collective."""
        agents_failed = metrics.get("rollout/agent/failed_fraction", 0.0)
        self.log(step, metrics, first_agent_error(groups, agents_failed, self._groups.world))

    def log(self, step: int, values: dict[str, float], agent_error: str = "") -> None:
        """Write a step's metrics everywhere and show one line; a collective. Empty values write nothing."""
        if not values:
            return
        self.check_folder()
        writer = self.writer

        def write() -> None:
            if writer is not None:
                # Checked here because TensorBoard writes in a separate thread, whose failure would be a traceback.
                require_space(writer.path, _RECORD_BYTES, "the log of a step", MAKE_ROOM)
                with disk_errors(writer.path, "the metrics"):
                    writer.write(step, values)

        run_on_leader(write, self._groups.world)
        if "rollout/reward" in values:
            self.console.step(step, self._config.run.num_steps, values, agent_error)
            if writer is not None:
                for text in self._warnings.check_step(values):
                    print(f"warning  {text}", file=sys.stderr, flush=True)
        elif "eval/accuracy" in values:
            when = f"of step {step}" if step else "before training"
            evaluated = self._config.reward.eval_score_name
            self.console.show(values)
            self.console.print(f"held-out {evaluated} {when}: {values['eval/accuracy']:.3f}")

    def show_servers(self, notes: Sequence[str]) -> None:
        """Print notes about the servers."""
        for note in notes:
            self.console.print(f"servers  {note}")

    def summarize(
        self, best: tuple[float, int] | None, policy_updates: int, answers_before: Sequence[Mapping[str, Any]]
    ) -> None:
        """Write ``summary.json`` and the curves, and print the best accuracy and the change of the results.

        A collective.

        Args:
            best: See ``RunState``.
            policy_updates: Updates of the whole run.
            answers_before: Responses from before training, on rank 0.
        """
        goal = self._config.eval.stop_at_accuracy
        if best is not None and goal is not None and best[0] >= goal:
            self.console.print(
                f"solved   eval/accuracy {best[0]:.3f} at step {best[1]} reached eval.stop_at_accuracy = {goal}"
            )
        run_on_leader(lambda: self._summarize(policy_updates, answers_before), self._groups.world)

    def _summarize(self, policy_updates: int, answers_before: Sequence[Mapping[str, Any]]) -> None:
        if self.writer is None:
            return
        config = self._config
        folder = self.folder
        console = self.console
        with disk_errors(folder, "the summary"):
            summarize(
                folder,
                world_size=self._layout.world_size,
                layout=str(self._layout),
                policy_updates=policy_updates,
                total_seconds=time.time() - self._started,
            )
            if config.log.curves:
                sources = config.data.train if isinstance(config.data.train, str) else ", ".join(config.data.train)
                write_curves(self.writer.path, folder / "curves.png", f"{config.loss.name} on {sources}")
        console.finish()
        console.print("\n" + before_after_table(folder, config.reward.eval_score_name))
        after = read_sample_responses(folder)
        if answers_before and after:
            console.print("\nheld-out problems\n" + compare_responses(answers_before, after))
        console.print("\nwritten\n" + list_output_files(folder))

    def close(self) -> None:
        """Close the files and trackers."""
        if self.writer is not None:
            self.writer.close()


def set_damaged_logs_aside(folder: Path) -> list[str]:
    """Take damaged lines out of the run's logs, and return warnings."""
    checks = {"metrics.jsonl": metric_problem, SAMPLES: sample_problem}
    return [note for name, check in checks.items() if (note := set_damaged_lines_aside(folder / name, check))]


def rollout_metrics(groups: Sequence[RolloutGroup], samples: Sequence[TrainingSample]) -> dict[str, Metric]:
    """Return metrics of the rollouts, as numerators and denominators of this rank."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scored = [r for r in rollouts if not r.reward_failed]
    lengths = [len(r.completion.token_ids) for r in rollouts]
    reasons = [r.completion.finish_reason for r in rollouts]
    # Groups whose rewards are all equal, or of which at most one is known.
    flat = [len({r.reward for r in group.rollouts if not r.reward_failed}) < 2 for group in groups]
    masks = [r.completion.loss_mask for r in rollouts]
    sampled = sum(n if m is None else int(m.sum()) for m, n in zip(masks, lengths, strict=True))
    num_trained = sum(int(s.loss_mask.sum()) for s in samples)
    sets = [r.completion.sampling_mask for r in rollouts if r.completion.sampling_mask is not None]
    mask_metrics = {"allowed_ids": Metric(sum(len(s.ids) for s in sets), sampled)} if sets else {}
    return {
        "reward": Metric(sum(r.reward for r in scored), len(scored)),
        **_part_metrics(scored),
        **_greedy_metrics(groups),
        "reward_failed_fraction": Metric(len(rollouts) - len(scored), len(rollouts)),
        "response_length": Metric(sum(lengths), len(rollouts)),
        "response_length_max": Metric(max(lengths, default=0), kind="max"),
        **{f"finish/{reason}": Metric(reasons.count(reason), len(rollouts)) for reason in FinishReason},
        "groups_without_signal": Metric(sum(flat), len(groups)),
        "dropped_token_fraction": Metric(sampled - num_trained, sampled),
        "given_token_fraction": Metric(sum(lengths) - sampled, sum(lengths)),
        **mask_metrics,
        **_agent_metrics(rollouts),
        **_count_metrics(rollouts),
    }


def source_metrics(groups: Sequence[RolloutGroup], names: Iterable[str]) -> dict[str, Metric]:
    """Return share of the groups and mean reward of each source, as numerators and denominators of this rank."""
    metrics = {}
    for name in names:
        chosen = [each for each in groups if each.prompt.limits is not None and each.prompt.limits.source == name]
        rewards = [r.reward for group in chosen for r in group.rollouts if not r.reward_failed]
        key = f"source/{source_metric(name)}"
        # Also without groups: the denominators of all ranks add up.
        metrics[f"{key}/fraction"] = Metric(len(chosen), len(groups))
        metrics[f"{key}/reward"] = Metric(sum(rewards), len(rewards))
    return metrics


def _greedy_metrics(groups: Sequence[RolloutGroup]) -> dict[str, Metric]:
    """Return reward, failures and length of the greedy responses, if the groups have them."""
    greedy = [group.greedy for group in groups if group.greedy is not None]
    if not greedy:
        return {}
    scored = [response.reward for response in greedy if not response.reward_failed]
    return {
        "greedy_reward": Metric(sum(scored), len(scored)),
        "greedy_failed_fraction": Metric(len(greedy) - len(scored), len(greedy)),
        "greedy_length": Metric(sum(response.num_tokens for response in greedy), len(greedy)),
    }


def _agent_metrics(rollouts: Sequence[Rollout]) -> dict[str, Metric]:
    """Return the fraction of failed episodes and the largest share of tools, if an agent played them."""
    completions = [rollout.completion for rollout in rollouts]
    if not any("agent/calls" in each.counts for each in completions):
        return {}
    shares = [each.counts["agent/tool_fraction"] for each in completions if "agent/tool_fraction" in each.counts]
    return {
        "agent/failed_fraction": Metric(sum(bool(each.failure) for each in completions), len(completions)),
        "agent/tool_fraction_max": Metric(max(shares, default=0.0), kind="max"),
    }


def first_agent_error(groups: Sequence[RolloutGroup], failed_fraction: float, world: ProcessGroup | None) -> str:
    """Return the first error of a step's failed episodes, on rank 0; a collective unless ``failed_fraction`` is 0."""
    if not failed_fraction:
        return ""
    failures = [rollout.completion.failure for group in groups for rollout in group.rollouts]
    first = next(filter(None, failures), "")
    return next(filter(None, gather_objects(first, world)), "")


def _count_metrics(rollouts: Sequence[Rollout]) -> dict[str, Metric]:
    """Return the mean of each count over the samples that have it."""
    counts = [rollout.completion.counts for rollout in rollouts]
    names = sorted({name for each in counts for name in each})
    return {name: Metric(sum(c[name] for c in counts if name in c), sum(name in c for c in counts)) for name in names}


def _part_metrics(scored: Sequence[Rollout]) -> dict[str, Metric]:
    """Return the mean of each named part over the samples that have it."""
    values: dict[str, list[float]] = {}
    for rollout in scored:
        for name, value in rollout.reward_parts.items():
            values.setdefault(name, []).append(value)
    shown = sorted(values)[:MAX_PARTS]
    if len(values) > MAX_PARTS:
        print(
            f"warning  the rewards of this step have {len(values)} differently named parts; the metrics have the first "
            f"{MAX_PARTS} of them. Name a part after what it scores, not after the sample",
            file=sys.stderr,
            flush=True,
        )
    return {f"reward/{name}": Metric(sum(values[name]), len(values[name])) for name in shown}
