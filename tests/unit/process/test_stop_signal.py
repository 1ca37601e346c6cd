"""Signals as a request to stop: who gets them, what they end, and what they leave alone."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

START = """
import ctypes, multiprocessing, os, signal, subprocess, sys, time
import torch.distributed as dist
from megatron_dppo.process.stop_signal import StopSignal

def main():
    with StopSignal() as stop:
        run(stop)

def ready():
    open(sys.argv[1], "w").close()
"""
END = """
if __name__ == "__main__":
    main()
"""
LOADING = """
def run(stop):
    ready()
    ctypes.CDLL(None).sleep(100)  # Python's own handlers would wait for its end
"""
HELPERS = """
def run(stop):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    stop.deferring = True
    manager = multiprocessing.get_context("spawn").Manager()
    queue = manager.Queue()
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(2,))
    forked.start()
    other = subprocess.Popen(["sleep", "2"])
    ready()
    while not stop.requested():
        time.sleep(0.05)
    time.sleep(0.3)
    queue.put(stop.name)
    forked.join()
    print(queue.get(), forked.exitcode, other.wait())
"""
TRAINING = """
def run(stop):
    stop.deferring = True
    ready()
    ctypes.CDLL(None).sleep(100)
"""


def start(folder: Path, body: str, *before: str) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(textwrap.dedent(START + body + END))
    process = subprocess.Popen(
        [*before, sys.executable, str(folder / "program.py"), str(folder / "ready")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not (folder / "ready").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    return process


def group(process: subprocess.Popen[str], number: signal.Signals) -> None:
    subprocess.run(["kill", f"-{number.value}", "--", f"-{process.pid}"], check=True)


SIGNALS = [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.long) for n in (signal.SIGINT, signal.SIGHUP))]


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_run_at_once_while_there_is_nothing_to_save(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, LOADING)
    process.send_signal(number)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 0 and f"stopped  by {number.name} before the training began" in error


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_to_the_process_group_ends_no_child(tmp_path: Path, number: signal.Signals) -> None:
    """A manager of multiprocessing, a fork, a program."""
    process = start(tmp_path, HELPERS)
    group(process, number)
    output, error = process.communicate(timeout=60)
    assert output.split() == [number.name, "0", "0"], error


@pytest.mark.slow
def test_a_second_ctrl_c_ends_the_run_and_a_forwarded_one_does_not(tmp_path: Path) -> None:
    process = start(tmp_path, TRAINING)
    group(process, signal.SIGINT)
    process.send_signal(signal.SIGINT)
    time.sleep(1.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130 and "by a second SIGINT, without a save" in error
    assert error.count("the run ends after this step and saves it") == 1


@pytest.mark.slow
def test_signals_that_are_ignored_at_the_start_stay_ignored(tmp_path: Path) -> None:
    process = start(tmp_path, LOADING, "nohup")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 0
