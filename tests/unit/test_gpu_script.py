"""The GPU script itself: what it prints and how it ends, rehearsed on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.checks import Result, run_check, table

SCRIPT = Path(__file__).parents[1] / "gpu/run_all.sh"


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHON": sys.executable}
    return subprocess.run([str(SCRIPT), *arguments], env=env, capture_output=True, text=True, check=False)


def test_rehearsal_prints_a_table_and_succeeds() -> None:
    done = run_script("--cpu-rehearsal", "--only", "losses")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 passed, 0 failed" in done.stdout
    assert "losses: dppo_binary_tv gradient" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_device_it_says_so_and_fails() -> None:
    done = run_script()
    assert done.returncode == 3 and "no CUDA device here" in done.stderr


def test_unknown_group_and_missing_wheel_folder_are_errors() -> None:
    assert run_script("--only", "losses,nonsense").returncode == 2
    assert "--wheels needs a folder" in run_script("--wheels", "/nowhere").stderr


def test_a_value_out_of_bounds_nan_or_an_exception_fails() -> None:
    def check(device: torch.device) -> Iterator[Result]:
        yield Result("fine", 1.0, 1.0)
        yield Result("too large", 1.1, 1.0)
        yield Result("not a number", float("nan"), 1.0)
        raise RuntimeError("device lost")

    results = run_check("group", check, torch.device("cpu"))
    assert [r.passed for r in results] == [True, False, False, False]
    assert "device lost" in table(results)
    assert not run_check("empty", lambda device: [], torch.device("cpu"))[0].passed
