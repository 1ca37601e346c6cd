"""Submitting the launch script as a user does, and waiting for what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.e2e.runs import ROOT, records
from tests.engines.servers import free_port
from tests.launch.slurm import Slurm

SCRIPT = ROOT / "launch/qwen3_moe_dppo.sh"


class Job:
    """A submitted job; ``output`` is what it has printed so far."""

    def __init__(
        self, slurm: Slurm, folder: Path, nodes: int, *arguments: str, sbatch: Sequence[str] = (), **env: str
    ) -> None:
        self._slurm, self._out = slurm, folder / "job.out"
        variables = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
        variables |= {"PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
        submitted = slurm.run(
            *("sbatch", "--parsable", f"--nodes={nodes}", f"--chdir={folder}", f"--output={self._out}"),
            *(*sbatch, str(SCRIPT), *arguments),
            env=variables,
        )
        self.id = submitted.strip()

    @property
    def output(self) -> str:
        return self._out.read_text(errors="replace") if self._out.exists() else ""

    @property
    def state(self) -> str:
        return self._field("JobState")

    @property
    def exit_code(self) -> int:
        return int(self._field("ExitCode").split(":")[0])

    @property
    def restarts(self) -> int:
        """Return the number of times that it was queued again."""
        return int(self._field("Restarts"))

    def _field(self, name: str) -> str:
        shown = self._slurm.run("scontrol", "-o", "show", "job", self.id)
        return dict(part.partition("=")[::2] for part in shown.split())[name]

    def until(self, text: str, timeout: float = 120, *, times: int = 1) -> None:
        """Wait until the job has printed a text so many times."""
        end = time.monotonic() + timeout
        while True:
            state = self.state  # before the output: a job that ends has printed all that it will
            if self.output.count(text) >= times:
                return
            assert state in ("PENDING", "CONFIGURING", "RUNNING"), f"{state} without {text!r}:\n{self.output}"
            assert time.monotonic() < end, f"no {text!r}:\n{self.output}"
            time.sleep(0.2)

    def end(self, timeout: float = 240) -> str:
        """Wait for the end; the state that it ended in."""
        limit = time.monotonic() + timeout
        while (state := self.state) in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
            assert time.monotonic() < limit, f"still {state}:\n{self.output}"
            time.sleep(0.5)
        return state

    def signal(self) -> None:
        """Send what Slurm sends before the time limit: SIGTERM to the script alone."""
        self._slurm.run("scancel", "--signal=TERM", "--batch", self.id)

    def start_again(self, starts: int) -> None:
        """Wait until the job has been queued again and has begun."""
        end = time.monotonic() + 120
        while (state := self.state) in ("PENDING", "COMPLETING") or self.restarts < starts:
            assert time.monotonic() < end and state != "FAILED", f"{state}:\n{self.output}"
            time.sleep(0.2)


def ranks_of(job: Job, count: int) -> dict[int, psutil.Process]:
    """The trainer's processes themselves, not the shells around them."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        result = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                env, line = process.environ(), process.cmdline()
                if env.get("SLURM_JOB_ID") == job.id and "RANK" in env and line[1:3] == ["-m", "megatron_dppo.train"]:
                    result[int(env["RANK"])] = process
        if len(result) == count:
            return result
        time.sleep(0.2)
    raise AssertionError(f"{result} of {count} ranks:\n{job.output}")


def two_ports() -> int:
    """The first of two free ports; not among those that the kernel gives to outgoing connections."""
    while True:
        port = free_port()
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
            return port


def python_with(folder: Path, trainer: str) -> str:
    """An interpreter that runs a line of shell in the place of the trainer."""
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *megatron_dppo.train*) {trainer}; exit 0;; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return str(python)


def is_serve(process: psutil.Process, port: int) -> bool:
    """Return True if it is the ``megatron-dppo serve`` of a port."""
    with contextlib.suppress(psutil.Error):
        line = process.cmdline()
        return line[1:4] == ["-m", "megatron_dppo.commands.main", "serve"] and str(port) in line
    return False


def is_launcher(process: psutil.Process, port: int) -> bool:
    """Return True if it is what `serve` has started for a port: the leader of a session."""
    with contextlib.suppress(psutil.Error, OSError):
        line = process.cmdline()
        return str(port) in line and "--model-path" in line and os.getsid(process.pid) == process.pid
    return False


def steps(folder: Path) -> list[int]:
    file = folder / "metrics.jsonl"
    return [r["step"] for r in records(folder) if "train/loss" in r] if file.exists() else []


def until_step(job: Job, folder: Path, step: int, timeout: float = 300) -> None:
    end = time.monotonic() + timeout
    while not (done := steps(folder)) or done[-1] < step:
        assert time.monotonic() < end and job.state != "FAILED", f"no step {step}:\n{job.output}"
        time.sleep(0.1)


def processes_with(word: str) -> list[str]:
    shown = (p.cmdline() for p in psutil.process_iter() if p.status() != psutil.STATUS_ZOMBIE)
    return [" ".join(line) for line in shown if word in line]
