"""Programs of agents end with the trainer, also by SIGKILL, and so does what has left their session."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megatron_dppo.process import reaper
from megatron_dppo_agents import runner

TRAINER = """
import asyncio, sys
from megatron_dppo.config.rollout import AgentConfig
from megatron_dppo_agents.runner import AgentTask, ProgramAgent
from megatron_dppo.process.orphans import no_orphans
command, isolation = sys.argv[1:]
config = AgentConfig(command=["x"], isolation=isolation)
task = AgentTask(prompt="", messages=[], label="", metadata={}, base_url="http://h/v1", api_key="k")
with no_orphans():
    asyncio.run(ProgramAgent([sys.executable, "-c", command], config).run(task))
"""
PROGRAM = """
import os, time
daemon = os.fork()
if daemon == 0:
    os.setsid()  # out of the session of the program
    time.sleep(600)
with open({file!r} + ".new", "w") as file:
    file.write(f"{{os.getpid()}} {{daemon}}")
os.rename({file!r} + ".new", {file!r})
time.sleep(600)
"""


@pytest.mark.parametrize("isolation", ["landlock", pytest.param("none", marks=pytest.mark.slow)])
def test_programs_and_their_daemons_end_after_a_sigkill_of_the_trainer(isolation: str, tmp_path: Path) -> None:
    file = tmp_path / "pids"
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, PROGRAM.format(file=str(file)), isolation])
    pids: list[int] = []
    try:
        wait_until(lambda: file.exists() or trainer.poll() is not None)
        pids = [int(pid) for pid in file.read_text().split()]
        assert all(map(is_running, pids))
        trainer.kill()
        trainer.wait()
        wait_until(lambda: not any(map(is_running, pids)))
    finally:
        trainer.kill()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_the_mark_is_that_of_the_reaper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(reaper.VARIABLE, "m")
    assert runner.marked_variables([])[reaper.VARIABLE] == "m"
    assert reaper.VARIABLE not in runner.program_variables([])
