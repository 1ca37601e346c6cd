"""Last, since it takes longest: the head's benchmark on the device, and its kernels under compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tests.gpu.checks import Result, not_run

ROOT = Path(__file__).parents[2]
SECONDS = 480


def check(device: torch.device) -> Iterator[Result]:
    """Exit codes; the figures are printed as they come."""
    sanitizer, benchmark = "memory accesses out of bounds in the head", "benchmarks/head.py, its gates"
    if device.type != "cuda":
        yield not_run(sanitizer, "CUDA and compute-sanitizer")
        yield not_run(benchmark, "CUDA")
        return
    if (program := shutil.which("compute-sanitizer")) is None:
        yield not_run(sanitizer, "compute-sanitizer (CUDA toolkit)")
    else:
        # With --json the checks are made in this very process, which is the one that is watched.
        command = [program, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "tests.gpu.run_all"]
        command += ["--only", "head", "--json", os.devnull]
        done = subprocess.run(command, cwd=ROOT, timeout=SECONDS, check=False)
        yield Result(f"{sanitizer} (exit code)", float(done.returncode), 0.0)
    with TemporaryDirectory() as folder:
        command = [sys.executable, "benchmarks/head.py", "--device", "cuda", "--rounds", "3", "--out", folder]
        try:
            done = subprocess.run(command, cwd=ROOT, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            yield Result(f"{benchmark}: not done", float("nan"), 0.0, f"still running after {SECONDS} s")
            return
    yield Result(f"{benchmark} (exit code)", float(done.returncode), 0.0)
