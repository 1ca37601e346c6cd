"""Base models of the tests: each is made once, as ``megatron-dppo base`` does, and read by every test that names it."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

from tests.e2e.forked import train_forked
from tests.e2e.runs import environment


@cache
def _session_folder() -> str:
    folder = tempfile.mkdtemp(prefix="bases-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def chain_sum_base(steps: int, processes: int = 1) -> Path:
    """The base model of ``chain_sum`` after so many supervised steps, with its experts on so many processes.

    ``.ci/run`` names a folder that its suites share.
    """
    shared = os.environ.get("MEGATRON_DPPO_TEST_BASE") or _session_folder()
    folder = Path(shared) / f"chain_sum-{steps}-{processes}"
    if not folder.exists():
        arguments = ["base", "task:chain_sum", str(folder), "--steps", str(steps)]
        arguments += ["--parallel.expert_model_parallel_size", str(processes)]
        done = train_forked(arguments, environment(), processes, timeout=600, entry="main")
        assert done.returncode == 0, done.stdout + done.stderr
    return folder
