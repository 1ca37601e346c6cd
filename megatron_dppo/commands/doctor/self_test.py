"""The self-test: processes on every device of this machine, each as of a run, and what they find."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SECONDS = 300.0
"""until the processes are ended; collectives give up after 60"""
CPU_PROCESSES = 2


@dataclass(frozen=True)
class SelfTestResult:
    """One number, and the largest one that is right; the worst of all processes."""

    name: str
    value: float
    bound: float | None
    """None = only told"""
    note: str = ""
    """what rank 0 knows of the cause"""

    @property
    def passed(self) -> bool:
        """Whether it is within the bound; NaN is not."""
        return self.bound is None or (math.isfinite(self.value) and self.value <= self.bound)

    def __str__(self) -> str:
        verdict = "" if self.bound is None else "  ok" if self.passed else "  FAILED"
        bound = "" if self.bound is None else f"  (at most {self.bound:g})"
        return f"{self.name}: {self.value:.3g}{bound}{verdict}" + (f"\n    {self.note}" if self.note else "")


@dataclass(frozen=True)
class SelfTest:
    """What came of it."""

    processes: int
    device: str
    checks: tuple[SelfTestResult, ...]
    seconds: float
    failure: str | None
    """why it did not come to its end, with the last lines of a process that says so"""

    @property
    def passed(self) -> bool:
        """Whether it ended and every check is within its bound."""
        return self.failure is None and bool(self.checks) and all(check.passed for check in self.checks)


def run_self_test(devices: int, *, environment: Mapping[str, str] | None = None) -> SelfTest:
    """Start one process a device, or two on the CPU, and wait for what they find.

    Args:
        devices: CUDA devices of this machine.
        environment: of the processes; None = this one's.
    """
    world, start = devices or CPU_PROCESSES, time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        processes = _start(folder, world, dict(os.environ if environment is None else environment))
        try:
            failure = _wait(folder, processes, time.monotonic() + SECONDS)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        checks = tuple(_checks(folder / "checks.jsonl"))
    device = "CUDA, nccl" if devices else "CPU, gloo"
    return SelfTest(world, device, checks, time.perf_counter() - start, failure)


def _start(folder: Path, world: int, environment: dict[str, str]) -> list[subprocess.Popen[bytes]]:
    processes = []
    for rank in range(world):
        own = dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        with (folder / f"rank_{rank}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "megatron_dppo.commands.doctor.self_test_rank", str(folder)],
                    env=environment | own | {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    return processes


def _wait(folder: Path, processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> str | None:
    """Why not all of them ended well."""
    while any(process.poll() is None for process in processes):
        ended = [rank for rank, process in enumerate(processes) if process.poll()]
        if ended:
            time.sleep(1.0)  # the first one to end is seldom the one that knows why
            return _why(folder, processes)
        if time.monotonic() > deadline:
            return f"still running after {SECONDS:.0f} s. {_last_lines(folder / 'rank_0.log')}"
        time.sleep(0.1)
    return _why(folder, processes) if any(process.returncode for process in processes) else None


def _why(folder: Path, processes: Sequence[subprocess.Popen[bytes]]) -> str:
    codes = {rank: process.poll() for rank, process in enumerate(processes) if process.poll()}
    rank = next(iter(codes))
    told = ", ".join(f"{rank}: {code}" for rank, code in codes.items())
    return f"processes ended early (rank: exit code {told}). {_last_lines(folder / f'rank_{rank}.log')}"


def _last_lines(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()[-12:]
    return "Its last lines:\n" + "\n".join(lines) if lines else "It printed nothing"


def _checks(file: Path) -> Iterator[SelfTestResult]:
    if file.exists():
        yield from (SelfTestResult(**json.loads(line)) for line in file.read_text().splitlines())
