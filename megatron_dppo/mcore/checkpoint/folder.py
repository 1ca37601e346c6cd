"""Folders of a run's checkpoints: names, states and pruning. One process changes them, by one rename each.

step_000004             complete
step_000005.partial     being written
step_000003.deleted     being deleted
step_000006.damaged     skipped when the run resumed from an older one; kept for the user
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dppo.errors import CheckpointError
from megatron_dppo.files import fsync, read_regular_file, write_synced

if TYPE_CHECKING:
    from megatron_dppo.types.stored_record import StoredRecord

STATE = "state.json"
_STEP = re.compile(r"step_(\d{6,15})")
"""A run has fewer than 10^9 steps."""
_PARTIAL, _DELETED = ".partial", ".deleted"


def checkpoint_name(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step_{step:06d}"


def step_number(checkpoint: Path) -> int:
    """Return the step of a checkpoint, parsed from its folder name."""
    return int(checkpoint.name.removeprefix("step_"))


def checkpoints_folder(run_folder: Path) -> Path:
    """Return the folder that holds a run's checkpoints."""
    return run_folder / "checkpoints"


def checkpoints(folder: Path) -> list[Path]:
    """Return all complete checkpoints of a run, oldest first. Their files are not checked."""
    paths = [path for path in folder.glob("step_*") if _STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(paths, key=step_number)


def read_state(checkpoint: Path) -> StoredRecord:
    """Return the run's state in a checkpoint: step, data cursor, policy version, configuration."""
    try:
        state = json.loads(read_regular_file(checkpoint / STATE), parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{checkpoint / STATE} cannot be read: {error}. Fix: delete this checkpoint.") from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"Expected a JSON object in {checkpoint / STATE}, got {type(state).__name__}. Fix: delete this checkpoint."
        )
    return state


def _refuse_constant(text: str) -> None:
    raise ValueError(f"it has the number {text}")


def is_finite(checkpoint: Path) -> bool:
    """Return True if the checkpoint's weights were finite. False if its state cannot be read."""
    try:
        return read_state(checkpoint).get("finite", True) is True
    except CheckpointError:
        return False


def create_partial(partial: Path) -> None:
    """Create the empty folder that a checkpoint is written to."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def partial_path(final: Path) -> Path:
    """Return the folder that a checkpoint is written to before it is complete."""
    return final.with_name(final.name + _PARTIAL)


def complete(partial: Path, final: Path) -> None:
    """Rename a written checkpoint to its final name."""
    # An existing checkpoint of this step is from before the run resumed from an older one.
    replaced = _mark_deleted(final) if final.exists() else None
    partial.rename(final)
    fsync(final.parent)
    if replaced is not None:
        shutil.rmtree(replaced)


def prune(folder: Path, keep: int, best: int | None) -> None:
    """Delete all but the ``keep`` newest checkpoints, the one of step ``best``, and the newest with finite weights."""
    paths = checkpoints(folder)
    retained = {*paths[-keep:], *[path for path in paths if is_finite(path)][-1:]}
    if best is not None:
        retained.add(folder / checkpoint_name(best))
    for old in paths:
        if old not in retained:
            shutil.rmtree(_mark_deleted(old))


def _mark_deleted(checkpoint: Path) -> Path:
    """Rename a checkpoint before its files are deleted, so that a kill leaves no incomplete checkpoint."""
    deleted = checkpoint.with_name(checkpoint.name + _DELETED)
    shutil.rmtree(deleted, ignore_errors=True)
    checkpoint.rename(deleted)
    fsync(checkpoint.parent)
    return deleted


def write_best(folder: Path, step: int) -> None:
    """Write the name of the best checkpoint to ``best.json``."""
    write_synced(folder / "best.json", json.dumps({"checkpoint": checkpoint_name(step)}) + "\n")


def remove_leftovers(folder: Path) -> None:
    """Delete leftovers of a killed save or prune. No run may be writing to the folder."""
    for path in folder.glob("step_*"):
        if _STEP.fullmatch(path.stem) and path.suffix in (_PARTIAL, _DELETED):
            shutil.rmtree(path)
    (folder / "best.json.partial").unlink(missing_ok=True)


def set_aside(checkpoint: Path, reason: str) -> Path:
    """Rename a checkpoint that the run does not resume from to ``step_N.REASON``, with its files unchanged."""
    target = checkpoint.with_name(f"{checkpoint.name}.{reason}")
    number = 1
    while target.exists():
        number += 1
        target = checkpoint.with_name(f"{checkpoint.name}.{reason}{number}")
    checkpoint.rename(target)
    fsync(checkpoint.parent)
    return target
