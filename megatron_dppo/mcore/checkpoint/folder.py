"""The folders of a run's checkpoints: names, states, pruning. One process changes them; every change is one rename.

step_000004             complete
step_000005.partial     being written
step_000003.deleted     being deleted
step_000006.damaged     was passed over when the run continued from an older one; kept for the user
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from megatron_dppo.errors import CheckpointError
from megatron_dppo.files import fsync, write_synced

STATE = "state.json"
_STEP = re.compile(r"step_(\d{6,})")
_PARTIAL, _DELETED = ".partial", ".deleted"


def checkpoint_name(step: int) -> str:
    """The folder of a step's checkpoint."""
    return f"step_{step:06d}"


def step_number(checkpoint: Path) -> int:
    """The step of a checkpoint, by its folder's name."""
    return int(checkpoint.name.removeprefix("step_"))


def checkpoints_folder(run_folder: Path) -> Path:
    """Return the folder that holds a run's checkpoints."""
    return run_folder / "checkpoints"


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints of a run that were completed, oldest first. Whether their files are whole is not looked at."""
    found = [path for path in folder.glob("step_*") if _STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_number)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The run's own state in a checkpoint (step, data cursor, policy version, configuration).

    Raises:
        CheckpointError: the file is not readable.
    """
    try:
        state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{checkpoint / STATE} cannot be read: {error}; delete this checkpoint") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{checkpoint / STATE} holds no table; delete this checkpoint")
    return state


def is_finite(checkpoint: Path) -> bool:
    """Whether its weights were finite when they were saved; also False when its state cannot be read."""
    try:
        return read_state(checkpoint).get("finite", True) is True
    except CheckpointError:
        return False


def begin(partial: Path) -> None:
    """An empty folder to write a checkpoint to."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def partial_path(final: Path) -> Path:
    """Where a checkpoint is written before it is complete."""
    return final.with_name(final.name + _PARTIAL)


def complete(partial: Path, final: Path) -> None:
    """Give a written checkpoint its name."""
    # Only a save of the same step, by a run that was resumed from an older one, can stand there.
    replaced = _hide(final) if final.exists() else None
    partial.rename(final)
    fsync(final.parent)
    if replaced is not None:
        shutil.rmtree(replaced)


def prune(folder: Path, keep: int, best: int | None) -> None:
    """Delete all but the ``keep`` newest checkpoints, the one of step ``best``, and the newest with finite weights."""
    found = checkpoints(folder)
    kept = {*found[-keep:], *[path for path in found if is_finite(path)][-1:]}
    if best is not None:
        kept.add(folder / checkpoint_name(best))
    for old in found:
        if old not in kept:
            shutil.rmtree(_hide(old))


def _hide(checkpoint: Path) -> Path:
    """Take a checkpoint's name away before its files go, so that what is left of it after a kill does not count."""
    hidden = checkpoint.with_name(checkpoint.name + _DELETED)
    shutil.rmtree(hidden, ignore_errors=True)
    checkpoint.rename(hidden)
    fsync(checkpoint.parent)
    return hidden


def write_best(folder: Path, step: int) -> None:
    """Name the best checkpoint in ``best.json``."""
    write_synced(folder / "best.json", json.dumps({"checkpoint": checkpoint_name(step)}) + "\n")


def remove_leftovers(folder: Path) -> None:
    """Delete what a killed save or prune left behind. No run may be writing there."""
    for path in folder.glob("step_*"):
        if _STEP.fullmatch(path.stem) and path.suffix in (_PARTIAL, _DELETED):
            shutil.rmtree(path)
    (folder / "best.json.partial").unlink(missing_ok=True)


def set_aside(checkpoint: Path, why: str) -> Path:
    """Rename a checkpoint that the run does not continue from to ``step_N.WHY``; the files stay as they are."""
    target = checkpoint.with_name(f"{checkpoint.name}.{why}")
    number = 1
    while target.exists():
        number += 1
        target = checkpoint.with_name(f"{checkpoint.name}.{why}{number}")
    checkpoint.rename(target)
    fsync(checkpoint.parent)
    return target
