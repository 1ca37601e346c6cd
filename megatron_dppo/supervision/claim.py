"""A Slurm job that was queued again ends what is left of its earlier try in a folder.

Slurm gives up a node that it cannot reach and starts the job on others. The processes there may live on, with the
folder of the run in their hands: on a shared file system their heartbeat goes on. The new try lays a claim beside the
lock; the old one looks for it with each heartbeat, and ends at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CLAIM = ".megatron_dppo.claim"
_LOST = 1
"""Exit code of a try that was told to end. Nobody waits for it."""


def this_try() -> dict[str, Any]:
    """Which try of which Slurm job this process belongs to; empty outside of Slurm."""
    job = os.environ.get("SLURM_JOB_ID")
    return {} if job is None else {"job": job, "try": int(os.environ.get("SLURM_RESTART_COUNT") or 0)}


def is_earlier(other: Mapping[str, Any]) -> bool:
    """Whether somebody belongs to an earlier try of our job."""
    ours = this_try()
    return bool(ours) and other.get("job") == ours["job"] and int(other.get("try", 0)) < ours["try"]


def claim(folder: Path) -> None:
    """Tell earlier tries of our job that work in the folder to end."""
    file = folder / f"{CLAIM}.{os.getpid()}"
    file.write_text(json.dumps(this_try()))
    file.replace(folder / CLAIM)


def withdraw(folder: Path) -> None:
    """The folder is ours."""
    (folder / CLAIM).unlink(missing_ok=True)


def end_if_claimed(folder: Path) -> None:
    """End this process at once, as by ``kill -9``, when a later try of our job wants the folder."""
    ours = this_try()
    if not ours:
        return
    try:
        theirs = json.loads((folder / CLAIM).read_bytes())
    except (OSError, ValueError):
        return
    if theirs.get("job") == ours["job"] and theirs.get("try", 0) > ours["try"]:
        print(
            f"lock     try {theirs['try']} of job {ours['job']} goes on in {folder}, and this one, cut off, ends",
            file=sys.stderr,
            flush=True,
        )
        os._exit(_LOST)
