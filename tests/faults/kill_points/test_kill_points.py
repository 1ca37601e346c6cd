"""A run that is killed anywhere continues to the same end: docs/testing.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[3]
_SAMPLE = 15


def _run(*arguments: str) -> str:
    """The tool in a process of its own: it must be the first to import Megatron, and fork without threads."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.faults.kill_points", *arguments],
        env=os.environ | {"PYTHONPATH": str(_ROOT)},
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def test_killed_at_a_point_and_resumed_equals_undisturbed() -> None:
    """A fixed sample of all variants, kill modes and phases; MEGATRON_DPPO_FAULTS is its size, or ``all``."""
    size = os.environ.get("MEGATRON_DPPO_FAULTS", str(_SAMPLE))
    output = _run(*([] if size == "all" else ["--limit", size]))
    print(output)
    killed = re.search(r"^all +(\d+) ", output, re.M)
    assert killed and int(killed[1]) >= 0.9 * (4000 if size == "all" else int(size)), output


def test_every_mutation_is_found() -> None:
    output = _run("--mutations")
    assert output.count("found") >= 7 and "MISSED" not in output, output
