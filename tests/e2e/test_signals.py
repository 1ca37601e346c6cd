"""Signals to a whole process group, and processes that are killed: nothing is lost, nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.runs import command, environment, flags
from tests.e2e.test_resume import assert_same_run

pytestmark = pytest.mark.e2e

SMALL = flags(
    parallel__expert_model_parallel_size=1,
    run__num_steps=4,
    rollout__prompts_per_step=4,
    rollout__samples_per_prompt=4,
    eval__max_prompts=8,
    eval__every=100,
    checkpoint__save_every=1,
    checkpoint__keep=9,
    log__tensorboard="false",
    log__curves="false",
)
REWARD = '''
import pathlib, time
FOLDER = pathlib.Path(__file__).parent

def reward(*, prompt, completion, label, metadata):
    """Waits, once it is asked to, in the middle of a sample."""
    if (FOLDER / "block").exists():
        (FOLDER / "blocked").touch()
        while (FOLDER / "block").exists():
            time.sleep(0.01)
    return float(len(completion) % 7)
'''


class Run:
    """A trainer in a process group of its own; ``output`` is what it has printed so far."""

    def __init__(self, folder: Path, log: Path, processes: int, **more: Any) -> None:
        self.checkpoints, self._log = folder / "checkpoints", log
        reward = f"{log.parent}/blocking.py:reward"
        arguments = [*SMALL, *flags(run__output_dir=folder, reward__function=reward, **more)]
        self.process = self._start(arguments, processes)

    def _start(self, arguments: list[str], processes: int) -> subprocess.Popen[bytes]:
        with self._log.open("w") as file:
            return subprocess.Popen(
                command(arguments, processes),
                env=environment() | {"PYTHONUNBUFFERED": "1"},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    def until(self, happened: Callable[[], Any], seconds: float = 400) -> None:
        end = time.monotonic() + seconds
        while not happened():
            assert self.process.poll() is None and time.monotonic() < end, self.output
            time.sleep(0.005)

    def saved(self, step: int) -> bool:
        return (self.checkpoints / f"step_{step:06d}").exists()

    def end(self) -> int:
        self.process.wait(400)
        return self.process.returncode

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


def all_gone(family: list[psutil.Process], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while left := [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        if time.monotonic() > end:
            raise AssertionError(f"left behind: {left}")
        time.sleep(0.1)
    return True


@pytest.mark.long
def test_group_signals_and_a_kill_leave_the_run_that_was_never_stopped(tmp_path: Path) -> None:
    """SIGTERM in mid-sample, after a save; SIGKILL of the rank."""
    (tmp_path / "blocking.py").write_text(REWARD)
    undisturbed = Run(tmp_path / "undisturbed", tmp_path / "undisturbed.log", 1)
    assert undisturbed.end() == 0, undisturbed.output

    folder, log = tmp_path / "run", tmp_path / "run.log"
    run = Run(folder, log, 1)
    run.until(lambda: run.saved(1))
    (tmp_path / "block").touch()
    run.until(lambda: (tmp_path / "blocked").exists())
    os.killpg(run.process.pid, signal.SIGTERM)
    run.until(lambda: "the run ends after this step" in run.output)
    (tmp_path / "block").unlink()
    assert run.end() == 0, run.output
    stopped = re.search(r"stopped  by SIGTERM after step (\d)", run.output)
    assert stopped and run.saved(int(stopped[1])) and int(stopped[1]) < 4, run.output

    run = Run(folder, log, 1)
    run.until(lambda: run.saved(int(stopped[1]) + 1))
    family = run.family()
    assert len(family) >= 2, f"a scoring process, a reaper: {family}"
    run.process.kill()
    assert run.end() == -signal.SIGKILL and all_gone(family, 30)

    run = Run(folder, log, 1)
    assert run.end() == 0, run.output
    assert_same_run(folder, tmp_path / "undisturbed")


def test_ranks_save_when_torchrun_is_killed_and_a_stopped_rank_is_named(tmp_path: Path) -> None:
    (tmp_path / "blocking.py").write_text(REWARD)
    folder, log = tmp_path / "run", tmp_path / "run.log"
    run = Run(folder, log, 2, run__num_steps=200)
    run.until(lambda: run.saved(1))
    family = run.family()
    run.process.kill()
    run.end()
    assert all_gone(family, 60)
    stopped = re.search(r"stopped  by SIGTERM after step (\d+)", run.output)
    assert stopped and run.saved(int(stopped[1])), run.output

    run = Run(folder, log, 2, run__num_steps=200, run__hang_minutes=0.3)
    run.until(lambda: run.saved(int(stopped[1]) + 1))
    family = run.family()
    (victim,) = [p for p in family if p.ppid() == run.process.pid and p.environ()["RANK"] == "0"]
    victim.send_signal(signal.SIGSTOP)
    run.until(lambda: "error: the run hangs" in run.output)
    victim.send_signal(signal.SIGCONT)  # torchrun would wait half a minute for it before a SIGKILL
    assert run.end() == 1 and all_gone(family, 30)
    assert re.search(
        rf"\[rank 1\] error: .* rank 0 \(process {victim.pid} on \S+\) has been in step \d+, phase", run.output
    )
    assert f"kill -CONT {victim.pid}" in run.output and re.search(r"exitcode\s*: 4", run.output), run.output
    assert "train_steps" in (folder / "hang/rank_00001.txt").read_text()
