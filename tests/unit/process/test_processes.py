"""Forked copies of a process end with it, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil

PROGRAM = """
import os, signal, time
from megatron_dppo.process.orphans import no_orphans
with no_orphans():
    child = os.fork()
    if child == 0:
        grandchild = os.fork()  # of a copy: it is nobody's to guard
        if grandchild == 0:
            time.sleep(600)
        print(os.getpid(), grandchild, flush=True)
        time.sleep(600)
    os.waitpid(child, 0)
"""


def test_a_forked_child_is_killed_when_its_parent_exits() -> None:
    """Its environment is the one that its maker was started with, so that no mark shows whose it is."""
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child, grandchild = map(int, process.stdout.readline().split())
    try:
        assert psutil.pid_exists(child)
        process.kill()
        process.wait()
        end = time.monotonic() + 60
        while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end, "the copy lives on"
            time.sleep(0.05)
    finally:
        for pid in (child, grandchild):
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)
