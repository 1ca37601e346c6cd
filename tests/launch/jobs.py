"""Submitting the launch script as a user does, and waiting for what it leaves behind."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.e2e.runs import ROOT
from tests.launch.slurm import Slurm

SCRIPT = ROOT / "launch/qwen3_moe_dppo.sh"


class Job:
    """A submitted job; ``output`` is what it has printed so far."""

    def __init__(self, slurm: Slurm, folder: Path, nodes: int, *arguments: str, **env: str) -> None:
        self._slurm, self._out = slurm, folder / "job.out"
        variables = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
        variables |= {"PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
        submitted = slurm.run(
            *("sbatch", "--parsable", f"--nodes={nodes}", f"--chdir={folder}", f"--output={self._out}"),
            *(str(SCRIPT), *arguments),
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
        """How often it was queued again."""
        return int(self._field("Restarts"))

    def _field(self, name: str) -> str:
        shown = self._slurm.run("scontrol", "-o", "show", "job", self.id)
        return dict(part.partition("=")[::2] for part in shown.split())[name]

    def until(self, text: str, timeout: float = 120) -> None:
        """Wait until the job has printed a text."""
        end = time.monotonic() + timeout
        while text not in self.output:
            assert self.state in ("PENDING", "CONFIGURING", "RUNNING"), f"{self.state} without {text!r}:\n{self.output}"
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
        """What Slurm sends before the time limit: SIGTERM to the script alone."""
        self._slurm.run("scancel", "--signal=TERM", "--batch", self.id)

    def start_again(self, starts: int) -> None:
        """Wait until the job has been queued again and has begun; Slurm would let it wait for two minutes.

        Not at once: a node refuses the credential of a job that it has just ended.
        """
        end = time.monotonic() + 120
        while (state := self.state) in ("PENDING", "COMPLETING") or self.restarts < starts:
            assert time.monotonic() < end and state != "FAILED", f"{state}:\n{self.output}"
            pending = state == "PENDING"
            time.sleep(3)
            if pending:
                self._slurm.run("scontrol", "update", f"JobId={self.id}", "StartTime=now", check=False)
