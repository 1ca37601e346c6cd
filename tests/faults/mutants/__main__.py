"""``python -m tests.faults.mutants``: the simulation has to fail on each changed copy of the package."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.mutants.patches import PATCHES, Patch
from tools.source_folders import ROOT, SOURCES

_HELPERS = "packages/engines/tests"
"""Where ``tests/__init__.py`` finds modules of the simulation."""
CONTROL_COUNT = 60
"""Schedules of the unchanged package that have to pass first."""


def find_failure(patch: Patch, folder: Path, count: int, processes: int) -> str:
    """Run the simulation on a changed copy of the package.

    Args:
        patch: the change.
        folder: holds the copy, unchanged before and afterwards.
        count: schedules that are tried at most.
        processes: that simulate.

    Returns:
        What the simulation found; empty if nothing.

    Raises:
        ValueError: the text to change is not in the file once.
        RuntimeError: the simulation did not run to its end.
    """
    file = folder / patch.path
    text = file.read_text()
    if text.count(patch.old) != 1:
        raise ValueError(f"{patch.name}: {patch.path} has its text {text.count(patch.old)} times: {patch.old!r}")
    file.write_text(text.replace(patch.old, patch.new))
    try:
        return simulate(patch.name, folder, patch.first, count, processes)
    finally:
        file.write_text(text)


def simulate(name: str, folder: Path, first: int, count: int, processes: int) -> str:
    """Run schedules until one fails, and return what failed; empty if nothing.

    Raises:
        RuntimeError: the simulation did not run to its end.
    """
    command = [sys.executable, "-m", "tests.faults.simulation", "--until-failure", "--first", str(first)]
    result = subprocess.run(
        [*command, "--count", str(count), "--processes", str(processes)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if not re.search(r"^\d+ schedules in ", result.stdout, re.MULTILINE):
        raise RuntimeError(f"{name}: the simulation did not run: {result.stdout[-500:]}{result.stderr[-1500:]}")
    found = re.search(r"^seed \d+: .*", result.stdout, re.MULTILINE)
    return found.group()[:160] if found else ""


def main() -> int:
    """Exit code 1 when a change was not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=3000, help="schedules within which a change has to show")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--name", default="", help="only changes whose name has this regular expression")
    parser.add_argument("--every", type=int, default=1, help="only every n-th of them")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many of them")
    options = parser.parse_args()
    patches = [patch for patch in PATCHES if re.search(options.name, patch.name)][options.skip :: options.every]
    survived = 0
    with tempfile.TemporaryDirectory(prefix="megatron_dppo-mutants-") as name:
        folder = Path(name)
        for part in (*SOURCES.values(), ROOT / "tests"):
            shutil.copytree(part, folder / part.name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / _HELPERS, folder / _HELPERS, ignore=shutil.ignore_patterns("__pycache__"))
        # A simulation that fails by itself would count every change as found.
        if failure := simulate("unchanged", folder, 0, CONTROL_COUNT, options.processes):
            print(f"the unchanged package fails: {failure}")
            return 1
        for patch in patches:
            begin = time.monotonic()
            failure = find_failure(patch, folder, options.count, options.processes)
            survived += not failure
            print(
                f"{'killed  ' if failure else 'SURVIVES'} {patch.name} ({time.monotonic() - begin:.0f} s)  {failure}",
                flush=True,
            )
    print(f"{len(patches)} changes, {survived} survive")
    return 1 if survived or not patches else 0


if __name__ == "__main__":
    sys.exit(main())
