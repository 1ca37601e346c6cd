"""The marker file of a run's folder: its name, when it began, and the job that began it."""

import json
import os
import re
import uuid
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path

from megatron_dppo.errors import ConfigError
from megatron_dppo.files import read_regular_file, write_synced

MARKER = ".megatron_dppo_run.json"
_TIME_FORMAT = "%Y-%m-%d %H:%M:%S"


@dataclass(frozen=True)
class Marker:
    """Contents of the marker file of a run's folder."""

    run_id: str
    submission: str
    """Job that began the run (see ``submission``)."""
    created: str
    moving_to: str = ""
    """Folder in ``old`` that the run is being moved to. Empty if it is not being moved."""


def new_marker() -> Marker:
    """Return the marker of a run that begins in this process."""
    return Marker(uuid.uuid4().hex, submission(), process_time().strftime(_TIME_FORMAT))


def read_marker(folder: Path) -> Marker | None:
    """Return the marker of a folder. None if no run began there."""
    file = folder / MARKER
    if not os.path.lexists(file):
        return None
    try:
        return _checked(Marker(**json.loads(read_regular_file(file))))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise ConfigError(
            f"{file} is damaged ({error}). If {folder} is the folder of a run, delete this file and set "
            "checkpoint.accept_unverified = true once. Without a checkpoint in it use another run.output_dir"
        ) from error


def _checked(marker: Marker) -> Marker:
    """Return the marker if its values are such as a run writes."""
    for name, value in vars(marker).items():
        if not isinstance(value, str) or len(value) > _MAX_LENGTH:
            raise TypeError(f"{name} = {str(value)[:_MAX_LENGTH]}")
    # The files of the run are moved there, so it must be a name in its own folder "old".
    if marker.moving_to and not re.fullmatch(r"\d{8}-\d{6}(-\d+)?", marker.moving_to):
        raise TypeError(f"moving_to = {marker.moving_to!r}: expected a time, as in '20260131-120000'")
    return marker


_MAX_LENGTH = 200


def write_marker(folder: Path, marker: Marker) -> None:
    """Replace the marker atomically."""
    write_synced(folder / MARKER, json.dumps(vars(marker), indent=2) + "\n")


def submission() -> str:
    """Return the job of this process, which stays the same when it is requeued or restarted. Empty if unknown."""
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID"):
        if os.environ.get(name):
            return f"{name}={os.environ[name]}"
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return "" if run_id == "none" else f"TORCHELASTIC_RUN_ID={run_id}"


def process_time() -> datetime:
    """Return the current time, the same on every call of a process, to the second."""
    return _process_time(os.getpid())


@cache
def _process_time(pid: int) -> datetime:
    # A fork inherits the cache, and has a number of its own.
    return datetime.now().replace(microsecond=0)


def first_start(folder: Path) -> datetime:
    """Return when the run in a folder was started first: the date that its chat template sees on every start.

    Without a run it is the current time. A damaged marker is reported when the folder is opened.
    """
    try:
        marker = read_marker(folder)
        if marker is not None and not marker.moving_to:
            return datetime.strptime(marker.created, _TIME_FORMAT)
    except (ConfigError, ValueError, OSError):
        pass
    return process_time()
