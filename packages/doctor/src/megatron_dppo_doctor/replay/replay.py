"""``megatron-dppo replay RUN --step N``: a step's updates from the preceding checkpoint and its recorded rollouts.

The replay writes nothing to the run's folder and needs no engine, reward or prompt. On the run's layout its result is
bit-identical. A single process reproduces several processes up to rounding, with the same mini-batches.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_dppo.config.io import dump_toml, load_config, validate
from megatron_dppo.config.model import ParallelConfig
from megatron_dppo.config.schema import Config
from megatron_dppo.config.user_functions import functions_as_text
from megatron_dppo.errors import CheckpointError, ConfigError, DataError, ErrorCollector
from megatron_dppo.parallel.objects import gather_objects
from megatron_dppo.parallel.platform import Platform, pin_threads
from megatron_dppo.policy.update import split_into_mini_batches
from megatron_dppo.report.clock import Clock
from megatron_dppo.report.records import read_metrics
from megatron_dppo.report.steps.files import StepMeta, read_meta, read_rows, recorded_steps
from megatron_dppo.report.steps.rows import groups_from_rows
from megatron_dppo.rollout.batch import CollectedRollouts
from megatron_dppo.rollout.request_scheduler import sampling_seed
from megatron_dppo.run.policy_setup import build_groups, build_trainer
from megatron_dppo.run.recording import SampleRecords, StepRecord, join_records
from megatron_dppo.run.run_records import reduce_updates
from megatron_dppo.run.step import PolicyUpdater, StepBatch, make_samples
from megatron_dppo.setup.resume import CANNOT_RESHARD, layout_identity
from megatron_dppo.setup.starts import CONFIG, STARTS, load_run_config, read_starts
from megatron_dppo.setup.teacher_setup import build_teacher
from megatron_dppo_doctor.replay.outcome import ReplayOutcome

if TYPE_CHECKING:
    from megatron_dppo.parallel.groups import ParallelGroups
    from megatron_dppo.policy.trainer import PolicyTrainer


@dataclass
class ReplayedRun:
    """Policy as it was before the step."""

    config: Config
    trainer: PolicyTrainer
    groups: ParallelGroups
    step: int
    """Number of finished rollout steps."""
    updater: PolicyUpdater


def replay_step(folder: Path, step: int, overrides: Sequence[str] = ()) -> ReplayOutcome | None:
    """Recompute a recorded step. A collective call of all processes. Return the comparison on rank 0, else None."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    file = _recorded_file(folder, step)
    meta = read_meta(file)
    if meta.step != step:
        raise ConfigError(f"{file} holds step {meta.step}, unlike its name. Fix: restore the original name")
    recorded = read_record(folder, step)
    config = _replay_config(folder, meta, world, overrides)
    checkpoint = _find_checkpoint(folder, step, config.checkpoint.fork_from)
    with _open_run(config, checkpoint, step) as run:
        rows, mini_batches = _select_rows(run, meta, file)
        groups, ages = groups_from_rows(rows)
        collected = CollectedRollouts(groups, ages, {}, dict(Counter(ages)))
        record = StepRecord(run.trainer.policy_version)
        samples = make_samples(groups, config.train, config.reward, has_teacher=config.distillation.is_enabled)
        batch = StepBatch(run.step, collected, samples, record=record)
        results = run.updater.step(batch, Clock(), mini_batches=mini_batches)
        # The same averages over updates as in the run's metrics.
        last = results[-1]
        metrics = reduce_updates([result.metrics for result in results]) | {
            "grad_norm": sum(result.grad_norm for result in results) / len(results),
            "learning_rate": last.learning_rate,
            "policy_version": float(last.policy_version),
        }
        recomputed_by_rank = gather_objects(record.pop_sample_records(run.trainer), run.groups.world)
        if not recomputed_by_rank:
            return None
        recomputed = {key: sample for rank_samples in recomputed_by_rank for key, sample in rank_samples.items()}
        same_layout = run.trainer.layout.world_size == meta.world_size and str(run.trainer.layout) == meta.layout
        outcome = _compare(recorded, meta, read_rows(file), recomputed, metrics, same_layout=same_layout)
        return replace(outcome, changed=tuple(overrides))


def read_record(folder: Path, step: int) -> dict[str, Any]:
    """Return the run's metrics of the step."""
    metrics = folder / "metrics.jsonl"
    record = next((record for record in read_metrics(metrics) if record["step"] == step), None)
    if record is None:
        raise DataError(
            f"{metrics} has no record of step {step}, so there is nothing to compare with. Fix: choose a recorded step"
        )
    return record


def _recorded_file(folder: Path, step: int) -> Path:
    if not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is not a folder; expected the folder of a run (run.output_dir)")
    files = recorded_steps(folder)
    if step not in files:
        available = ", ".join(map(str, list(files)[:20])) + (" ..." if len(files) > 20 else "")
        raise ConfigError(
            f"--step {step}: {str(folder)!r} has no rollouts of that step; "
            + (f"it has those of {available}" if files else "log.rollouts_every = 1 makes a run write them")
        )
    return files[step]


def load_config_of_step(folder: Path, step: int, overrides: Sequence[str]) -> Config:
    """Return the configuration that a step of a run was trained with: that of the last start before the step."""
    load_run_config(folder, ())  # raises if this is not the folder of a run
    before = [start for start in read_starts(folder) if (start.get("resumed_step") or 0) < step]
    if not before:
        raise ConfigError(f"{folder / STARTS} has no start of the run before step {step}")
    start = before[-1]
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / CONFIG
        with functions_as_text():
            recorded = validate(start.get("config", {}), str(folder / STARTS))
        file.write_text(dump_toml(recorded), encoding="utf-8")
        all_overrides = [*overrides, "--run.output_dir", str(folder)]
        try:
            return load_config(file, all_overrides, relative_to=Path(start.get("cwd", ".")))
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(file), str(folder / CONFIG))) from error


def _replay_config(folder: Path, meta: StepMeta, world: int, overrides: Sequence[str]) -> Config:
    config = load_config_of_step(folder, meta.step, overrides)
    if world == meta.world_size or any("parallel" in override for override in overrides):
        return config
    if world != 1:
        raise ConfigError(
            f"step {meta.step} was trained by {meta.world_size} processes ({meta.layout}), and this command runs with "
            f"{world}. Fix: torchrun --nproc-per-node {meta.world_size} -m megatron_dppo.commands.main replay {folder} "
            f"--step {meta.step}, or one process without torchrun"
        )
    # As in the run: the two optimizers have different checkpoint formats.
    single = ParallelConfig(
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
        virtual_pipeline_model_parallel_size=None,
    )
    return config.model_copy(update={"parallel": single})


def _find_checkpoint(folder: Path, step: int, fork_from: str | None) -> Path | None:
    """Return the checkpoint of the preceding step, in the run or its fork source. None for the first step."""
    from megatron_dppo.mcore.checkpoint.folder import checkpoints, checkpoints_folder, read_state

    if step == 1:
        return None
    saved_in = checkpoints_folder(folder)
    by_step = {read_state(checkpoint)["step"]: checkpoint for checkpoint in checkpoints(saved_in)}
    if fork_from is not None and step - 1 not in by_step and read_state(Path(fork_from))["step"] == step - 1:
        return Path(fork_from)
    if step - 1 not in by_step:
        available = ", ".join(str(number) for number in sorted(by_step)) or "none"
        replayable = [number + 1 for number in sorted(by_step) if number + 1 in recorded_steps(folder)]
        raise CheckpointError(
            f"--step {step} needs the checkpoint of step {step - 1}, and {saved_in} has those of steps "
            f"{available}; {f'replay one of steps {replayable}, or ' if replayable else ''}set checkpoint.save_every "
            "and checkpoint.keep so that it is written and kept"
        )
    return by_step[step - 1]


@contextmanager
def _open_run(config: Config, checkpoint: Path | None, step: int) -> Iterator[ReplayedRun]:
    platform = Platform.detect()
    pin_threads(config.run.threads_per_rank, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    # Before the first import of Megatron.
    from megatron_dppo.mcore.shims import apply_shims

    apply_shims(platform)
    from megatron_dppo.mcore import setup
    from megatron_dppo.mcore.checkpoint.folder import read_state
    from megatron_dppo.mcore.checkpoint.save_load import find_damage
    from megatron_dppo.setup.inputs import read_model

    setup.start_process_group(platform, config.run.wait_minutes)
    try:
        world, problems = setup.new_host_world(config.run.wait_minutes), ErrorCollector()
        inputs = read_model(config, int(os.environ.get("WORLD_SIZE", "1")), problems).complete
        problems.raise_if_any()
        assert inputs is not None
        state: dict[str, Any] = {}
        if checkpoint is not None:
            if damage := find_damage(checkpoint):
                raise CheckpointError(f"{checkpoint} is damaged: {damage}")
            state = read_state(checkpoint)
            _check_layout(checkpoint, state["layout"], layout_identity(config.model, config.parallel, inputs))
        groups = build_groups(config.run, inputs, platform, world)
        teacher = build_teacher(config.distillation, config.model, config.rollout.temperature, inputs, groups, platform)
        setup.seed_random_states(config.run.seed)
        trainer = build_trainer(config, inputs, groups, platform)
        if checkpoint is not None:
            here = layout_identity(config.model, config.parallel, inputs)
            same = all(here[key] == state["layout"][key] for key in ("layout", "world_size"))
            trainer.load(checkpoint, same_layout=same)
        yield ReplayedRun(config, trainer, groups, step - 1, PolicyUpdater(trainer, config, teacher))
    finally:
        setup.shutdown_megatron()


def _check_layout(checkpoint: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    for key, reason in CANNOT_RESHARD.items():
        if here[key] != there[key]:
            raise CheckpointError(
                f"{checkpoint} was written on {there['layout']} with {key} = {there[key]}, and here it is {here[key]}: "
                f"{reason}. Replay with {there['world_size']} processes (torchrun)"
            )


def _select_rows(
    run: ReplayedRun, meta: StepMeta, file: Path
) -> tuple[list[dict[str, Any]], Callable[[int], list[list[int]]] | None]:
    """Return this rank's rows, and the mini-batches if this process stands for several data-parallel ranks.

    The function of mini-batches takes the epoch. It is None if the trainer's own split applies.
    """
    rows = read_rows(file)
    dp = run.trainer.layout.dp
    if dp == meta.dp:
        return [row for row in rows if row["dp_rank"] == run.trainer.dp_rank], None
    if dp != 1:
        raise ConfigError(
            f"the step has the samples of {meta.dp} data-parallel ranks, here there are {dp}; replay with as many, or "
            "with one process"
        )
    # As the rows of the ranks follow each other, a rank's samples begin after those of the ranks below it.
    counts = Counter(row["dp_rank"] for row in rows)
    starts = {rank: sum(counts[r] for r in range(rank)) for rank in range(meta.dp)}

    def mini_batches(epoch: int) -> list[list[int]]:
        merged: list[list[int]] = [[] for _ in range(run.config.train.mini_batches)]
        for rank, start in starts.items():
            # The seed that ``PolicyUpdater`` gave that rank in the run.
            seed = sampling_seed(run.config.run.seed, "order", run.step, rank)
            rank_batches = split_into_mini_batches(counts[rank], run.config.train.mini_batches, seed, epoch)
            for index, part in enumerate(rank_batches):
                merged[index] += [start + i for i in part]
        return merged

    return rows, mini_batches


def _compare(
    recorded: Mapping[str, Any],
    meta: StepMeta,
    rows: Sequence[dict[str, Any]],
    recomputed: SampleRecords,
    metrics: dict[str, float],
    *,
    same_layout: bool,
) -> ReplayOutcome:
    largest = 0.0
    decisions = 0
    tokens = 0
    for row in rows:
        count = len(row["response_ids"])
        sample = join_records(recomputed, row["sample"], row.get("segment_lengths") or [count])
        # Positions of the trained tokens within the response; a sample's columns end with its response.
        index = torch.tensor(row["loss_mask"], dtype=torch.bool).nonzero().squeeze(1)
        was = torch.tensor(row["logprobs"])[index]
        now = sample.logprobs[-count:][index - count]
        mask_differs = torch.tensor(row["keep"], dtype=torch.bool)[index] != sample.keep[-count:][index - count]
        tokens += len(index)
        decisions += int(mask_differs.sum())
        largest = max(largest, float((was - now).abs().max()) if len(index) else 0.0)
    both = {
        name: (float(recorded[f"train/{name}"]), value)
        for name, value in metrics.items()
        if recorded.get(f"train/{name}") is not None
    }
    return ReplayOutcome(
        step=meta.step, tokens=tokens, largest=largest, decisions=decisions, metrics=both, same_layout=same_layout
    )
