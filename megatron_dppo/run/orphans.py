"""Processes end with their parent: children with this process, this process with its launcher."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from megatron_dppo.run import reaper

_PR_SET_PDEATHSIG = 1
_guarded = 0
"""The process whose forked children end with it; 0 = none. A copy of it in such a child is no guarded process."""
_forking = False
"""True if the current fork needs a parent-death signal."""


@contextmanager
def no_orphans() -> Iterator[None]:
    """Processes that are started inside end soon after this one, even after a SIGKILL (see ``reaper``)."""
    if sys.platform != "linux":
        yield
        return
    before, mark = os.environ.get(reaper.VARIABLE), secrets.token_hex(16)
    program = [sys.executable, "-I", "-S", str(Path(reaper.__file__)), str(os.getpid()), mark]
    # In a session of its own: it must live through a signal to this process's group.
    subprocess.Popen(
        program,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )
    os.environ[reaper.VARIABLE] = mark
    try:
        with _forks_end_with_us():
            yield
    finally:
        del os.environ[reaper.VARIABLE]
        if before is not None:
            os.environ[reaper.VARIABLE] = before


@contextmanager
def _forks_end_with_us() -> Iterator[None]:
    """Copies of this process get SIGKILL when it ends: to the reaper they show the environment that *it* was started
    with. Only those that the main thread makes, such as a data loader's workers, since the signal follows a thread."""
    global _guarded
    _register_hooks()
    before, _guarded = _guarded, os.getpid()
    try:
        yield
    finally:
        _guarded = before


@cache
def _register_hooks() -> None:
    libc = ctypes.CDLL(None, use_errno=True)

    def before() -> None:
        global _forking
        _forking = os.getpid() == _guarded and threading.current_thread() is threading.main_thread()

    def after_in_child() -> None:
        if _forking:
            libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != _guarded:  # it died before that
                os._exit(1)

    os.register_at_fork(before=before, after_in_child=after_in_child)


def stop_when_torchrun_dies() -> None:
    """Get SIGTERM when torchrun ends without ending this rank (a SIGKILL, the out-of-memory killer).

    Only under torchrun: a shell may end, and ``nohup`` asks for the opposite.
    """
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:  # it died before that
        os.kill(os.getpid(), signal.SIGTERM)
