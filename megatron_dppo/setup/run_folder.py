"""Folder of a run: checks, lock, marker file, and the move of an old run to ``old/TIME``.

The marker file shows that a run began here. Only the names in ``RUN_FILES`` are ever written, moved or replaced, and an
old run is moved to ``old/TIME`` in the same folder: no file of the user is deleted. One process does this, under the
lock.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_dppo.config.run import CheckpointConfig, RunConfig
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, UserError
from megatron_dppo.files import folder_bytes
from megatron_dppo.mcore.checkpoint.folder import checkpoints, checkpoints_folder, read_state, remove_leftovers
from megatron_dppo.parallel.objects import is_leader, run_on_leader
from megatron_dppo.process.lock import FolderLock
from megatron_dppo.process.marker import (
    MARKER,
    Marker,
    first_start,
    new_marker,
    process_time,
    read_marker,
    submission,
    write_marker,
)
from megatron_dppo.setup.failed_functions import FAILED_FUNCTIONS

OLD = "old"
UNSAVED = "unsaved"
"""Folder with the metrics of starts that left no checkpoint."""
_WRITTEN_ASIDE = (FAILED_FUNCTIONS, "tracker_steps.json", "hf", "hf-adapter")
"""Names that a run writes under another one first."""
_LOGS = ("metrics.jsonl", "samples.jsonl", "trackers.json")
RUN_FILES = (
    "config.toml",
    "starts.jsonl",
    UNSAVED,
    *(f"{name}{end}" for name in _LOGS for end in ("", ".partial", ".damaged")),
    *(f"{name}{end}" for name in _WRITTEN_ASIDE for end in ("", ".partial")),
    "summary.json",
    "curves.png",
    "report.html",
    "rollouts",
    "checkpoints",
    "weights",
    "tensorboard",
    "wandb",
    "swanlab",
    "comet_ml",
)
"""Names that a run writes, besides the marker, the lock and ``old``.

Without a marker such files do not belong to a run.
"""


@dataclass(frozen=True)
class OpenFolder:
    """Output folder of a run, locked and prepared."""

    notes: list[str]
    lock: FolderLock | None
    """None on all ranks but 0."""


@contextmanager
def open_folder(config: Config) -> Iterator[OpenFolder]:
    """Lock the output folder and prepare it for the run, and unlock it at the end. A collective of all ranks."""
    folder = Path(config.run.output_dir)
    lock: list[FolderLock] = []

    def lock_and_prepare() -> list[str]:
        try:
            check_output_dir(config)
            folder.mkdir(parents=True, exist_ok=True)
            lock.append(FolderLock(folder))
            notes = _prepare(folder, config.run, config.checkpoint)
        except OSError as error:
            raise ConfigError(f"run.output_dir = {str(folder)!r} cannot be used: {error}") from error
        return [f"lock     {lock[0].note}", *notes] if lock[0].note else notes

    try:
        notes = run_on_leader(lock_and_prepare, dist.group.WORLD)
        yield OpenFolder(notes, lock[0] if lock else None)
    finally:
        if lock and is_leader(dist.group.WORLD):
            lock[0].release()


def check_output_dir(config: Config) -> None:
    """Check that a run may write to its output folder. Creates and changes nothing."""
    folder = Path(config.run.output_dir)
    resolved = folder.resolve()
    if resolved in (Path(resolved.anchor), Path(os.path.expanduser("~")).resolve()):
        raise ConfigError(f"run.output_dir = {str(folder)!r} is {resolved}; choose a separate folder for the run")
    if folder.is_symlink() and not folder.exists():
        raise ConfigError(f"run.output_dir = {str(folder)!r} is a link to {os.readlink(folder)}, which does not exist")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"run.output_dir = {str(folder)!r} is a file; choose a folder")
    for key, value in _inputs(config):
        source = Path(value).resolve()
        if source == resolved:
            raise ConfigError(
                f"run.output_dir = {str(folder)!r} is also {key} = {value!r}; a run must not write into its own input"
            )
        for name in (*RUN_FILES, OLD):
            if source.is_relative_to(resolved / name):
                raise ConfigError(
                    f"{key} = {value!r} lies in {folder / name}, which this run would overwrite or move; choose "
                    "another run.output_dir"
                )
    if conflicts := _conflicting_files(folder, adopt=config.checkpoint.accept_unverified):
        older = ". To resume a run of an older version, set checkpoint.accept_unverified = true"
        raise ConfigError(
            f"run.output_dir = {str(folder)!r} holds {', '.join(conflicts)}, which a run writes, but no run began "
            f"there (it has no {MARKER}). Choose another folder, or move these files away"
            f"{older if _has_states(folder) else ''}"
        )


def foreign_files(run: RunConfig) -> list[str]:
    """Return the entries of an output folder in which no run began; empty if a run did, or there is no folder."""
    folder = Path(run.output_dir)
    if not folder.is_dir() or (folder / MARKER).exists():
        return []
    return sorted(entry.name for entry in folder.iterdir())


def _inputs(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the keys and values of all existing paths that the run reads."""
    named: dict[str, Any] = {
        "model.path": config.model.path,
        "model.reference_path": config.model.reference_path,
        "distillation.teacher_path": config.distillation.teacher_path,
        "data.train": config.data.train,
        "data.eval": config.data.eval,
        "checkpoint.fork_from": config.checkpoint.fork_from,
    }
    for key, value in named.items():
        values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        yield from ((key, each) for each in values if isinstance(each, str) and os.path.exists(each))


def _conflicting_files(folder: Path, *, adopt: bool) -> list[str]:
    """Return names in ``RUN_FILES`` that exist without a marker. Empty if ``adopt`` and the folder has checkpoints."""
    if (folder / MARKER).exists():
        return []
    if adopt and _has_states(folder):
        return []
    return [name for name in RUN_FILES if os.path.lexists(folder / name)]


def _has_states(folder: Path) -> bool:
    return any(checkpoints_folder(folder).glob("step_*/state.json"))


def _prepare(folder: Path, run: RunConfig, checkpoint: CheckpointConfig) -> list[str]:
    """Write the marker, move an old run aside if the configuration says so, and return messages for the user."""
    notes: list[str] = []
    marker = read_marker(folder)
    if marker is not None:
        # Left by a start that was killed between writing and renaming.
        for name in (MARKER, "config.toml", "starts.jsonl"):
            (folder / f"{name}.partial").unlink(missing_ok=True)
    if marker is None:
        write_marker(folder, new_marker())
    elif marker.moving_to:
        notes.append(move_aside(folder, marker))  # finishes the move of a start that was killed
    elif run.overwrite and any(os.path.lexists(folder / name) for name in RUN_FILES):
        if reason := _reason_to_resume(folder, marker):
            notes.append(f"resume   run.overwrite = true is ignored: {reason}")
        else:
            notes.append(move_aside(folder, marker))
    if checkpoint.resume == "never" and checkpoints(checkpoints_folder(folder)):
        raise ConfigError(
            f"{folder} already holds a run and checkpoint.resume = 'never'; choose another run.output_dir, or set "
            "run.overwrite = true to move that run aside"
        )
    remove_leftovers(checkpoints_folder(folder))
    return notes


def set_metrics_aside(folder: Path) -> None:
    """Move the metrics of a start that left no checkpoint to ``unsaved/metrics_N.jsonl``."""
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file() or not metrics.stat().st_size:
        return
    (folder / UNSAVED).mkdir(exist_ok=True)
    number = 1
    while os.path.lexists(target := folder / UNSAVED / f"metrics_{number}.jsonl"):
        number += 1
    metrics.rename(target)


def template_time(run: RunConfig) -> datetime:
    """Return the date that the chat template of a start sees: that of the run's first start."""
    folder = Path(run.output_dir)
    if not run.overwrite:
        return first_start(folder)
    try:
        marker = read_marker(folder)
    except ConfigError:
        marker = None
    # A run that this start moves aside does not count.
    is_resumed = marker is not None and not marker.moving_to and bool(_reason_to_resume(folder, marker))
    return first_start(folder) if is_resumed else process_time()


def _was_restarted() -> bool:
    names = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
    return any(os.environ.get(name, "0") not in ("", "0") for name in names)


def _reason_to_resume(folder: Path, marker: Marker) -> str:
    """Return the reason why ``overwrite`` must not move the existing run. Empty if it may.

    A requeued job has the same command as its first attempt, ``run.overwrite`` included. It must resume its run.
    """
    job = submission()
    if job and job == marker.submission and (_was_restarted() or not is_finished(folder)):
        return f"this job ({job}) began the run in this folder"
    if not job and _was_restarted():
        return "this is a restart of the same job"
    return ""


def is_finished(folder: Path) -> bool:
    """Return True if the run of a folder has trained its last step."""
    saved = checkpoints(checkpoints_folder(folder))
    try:
        if not saved:
            return False
        state = read_state(saved[-1])
        config, best = state["config"], state.get("best")
        goal = config.get("eval", {}).get("stop_at_accuracy")
        solved = goal is not None and best is not None and best[0] >= goal
        return bool(solved or state["step"] >= config["run"]["num_steps"])
    except (UserError, KeyError, TypeError):
        return False


def move_aside(folder: Path, marker: Marker) -> str:
    """Move the existing run to ``old/TIME``, or finish a move that was interrupted."""
    if not marker.moving_to:
        name = time.strftime("%Y%m%d-%H%M%S")
        number = 1
        while (folder / OLD / name).exists():
            number += 1
            name = f"{time.strftime('%Y%m%d-%H%M%S')}-{number}"
        marker = Marker(marker.run_id, marker.submission, marker.created, name)
        # Written first, so that the next start finishes the move if this one is killed.
        write_marker(folder, marker)
    target = folder / OLD / marker.moving_to
    for path in (folder / OLD, target):
        if path.is_symlink():
            raise ConfigError(f"{path} is a link, and a run moves its files only within its folder; delete the link")
    target.mkdir(parents=True, exist_ok=True)
    for name in RUN_FILES:
        if os.path.lexists(folder / name):
            (folder / name).rename(target / name)
    write_marker(target, Marker(marker.run_id, marker.submission, marker.created))
    write_marker(folder, new_marker())
    runs = [path for path in (folder / OLD).iterdir() if path.is_dir()]
    size = sum(map(folder_bytes, runs))
    return (
        f"moved    the previous run in {folder} to {target}; this run begins at step 0\n"
        f"         {folder / OLD} holds {len(runs)} run(s), {size / 2**20:.0f} MiB. Delete runs that you do not need"
    )
