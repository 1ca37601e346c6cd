"""The self-test: starts one process for each device, as a run does, and collects their checks."""

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

TIMEOUT_SECONDS = 300.0
"""Time limit of the processes. Collectives time out after 60 s."""
CPU_PROCESSES = 2


@dataclass(frozen=True)
class SelfTestCheck:
    """One measured error and its bound."""

    name: str
    value: float
    """Worst value of all processes."""
    bound: float | None
    """Largest value that passes. None for a measurement that is only printed."""
    note: str = ""
    """Cause of a failure as seen by rank 0."""

    @property
    def passed(self) -> bool:
        """True if the value is within the bound. NaN is not."""
        return self.bound is None or (math.isfinite(self.value) and self.value <= self.bound)

    def __str__(self) -> str:
        verdict = "" if self.bound is None else "  ok" if self.passed else "  FAILED"
        bound = "" if self.bound is None else f"  (at most {self.bound:g})"
        return f"{self.name}: {self.value:.3g}{bound}{verdict}" + (f"\n    {self.note}" if self.note else "")


@dataclass(frozen=True)
class SelfTestReport:
    """Result of the self-test."""

    processes: int
    device: str
    checks: tuple[SelfTestCheck, ...]
    seconds: float
    failure: str | None
    """Reason why the processes did not finish, with the last lines of one of them. None if they did."""

    @property
    def passed(self) -> bool:
        """True if the processes finished and every check passed."""
        return self.failure is None and bool(self.checks) and all(check.passed for check in self.checks)


def run_self_test(devices: int, *, environment: Mapping[str, str] | None = None) -> SelfTestReport:
    """Start one process for each device, or two on the CPU, and collect their checks."""
    world_size = devices or CPU_PROCESSES
    start_time = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        processes = _start_processes(folder, world_size, dict(os.environ if environment is None else environment))
        try:
            failure = _wait_for_exit(folder, processes, time.monotonic() + TIMEOUT_SECONDS)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        checks = tuple(_read_checks(folder / "checks.jsonl"))
    device = "CUDA, nccl" if devices else "CPU, gloo"
    return SelfTestReport(world_size, device, checks, time.perf_counter() - start_time, failure)


def _start_processes(folder: Path, world_size: int, environment: dict[str, str]) -> list[subprocess.Popen[bytes]]:
    processes = []
    for rank in range(world_size):
        size = str(world_size)
        ranks = dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
        with (folder / f"rank_{rank}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "megatron_dppo_doctor.doctor.self_test_rank", str(folder)],
                    env=environment | ranks | {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    return processes


def _wait_for_exit(folder: Path, processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> str | None:
    """Return why a process failed, or None if all of them succeed."""
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            # The first process to exit is seldom the one with the cause: let the others print theirs.
            time.sleep(1.0)
            return _failure_text(folder, processes)
        if time.monotonic() > deadline:
            return f"still running after {TIMEOUT_SECONDS:.0f} s. {_last_lines(folder / 'rank_0.log')}"
        time.sleep(0.1)
    return _failure_text(folder, processes) if any(process.returncode for process in processes) else None


def _failure_text(folder: Path, processes: Sequence[subprocess.Popen[bytes]]) -> str:
    codes = {rank: process.poll() for rank, process in enumerate(processes) if process.poll()}
    rank = next(iter(codes))
    listed = ", ".join(f"{rank}: {code}" for rank, code in codes.items())
    return f"processes failed (rank: exit code {listed}). {_last_lines(folder / f'rank_{rank}.log')}"


def _last_lines(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()[-12:]
    return "Its last lines:\n" + "\n".join(lines) if lines else "It printed nothing"


def _read_checks(file: Path) -> Iterator[SelfTestCheck]:
    if file.exists():
        yield from (SelfTestCheck(**json.loads(line)) for line in file.read_text().splitlines())
