"""Processes that exit with their parent: children with this process, this process with its launcher."""

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

from megatron_dppo.process import reaper

_PR_SET_PDEATHSIG = 1
_guarded = 0
"""Id of the process whose forked children exit with it. 0 if there is none.

A forked child inherits the value, but its own id differs, so it is not guarded.
"""
_forking = False
"""True if the current fork needs a parent-death signal."""


@contextmanager
def no_orphans() -> Iterator[None]:
    """Let ``reaper`` kill what is started in this context soon after this process exits, even by SIGKILL."""
    if sys.platform != "linux":
        yield
        return
    before, mark = os.environ.get(reaper.VARIABLE), secrets.token_hex(16)
    program = [sys.executable, "-I", "-S", str(Path(reaper.__file__)), str(os.getpid()), mark]
    # In a separate session, so that it survives a signal to this process's group.
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
    """Send SIGKILL to forked children of this process when it exits.

    The reaper does not find them: they show the environment that *this* process was started with, without the mark.
    Covers only forks of the main thread, such as the workers of a data loader: the kernel sends the signal when the
    forking thread ends.
    """
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
            if os.getppid() != _guarded:  # the parent exited before the call
                os._exit(1)

    os.register_at_fork(before=before, after_in_child=after_in_child)


def stop_when_torchrun_dies() -> None:
    """Receive SIGTERM if torchrun exits without stopping this rank (a SIGKILL, the out-of-memory killer).

    Only under torchrun: a shell may exit before its jobs, and ``nohup`` requires the opposite.
    """
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:  # torchrun exited before the call
        os.kill(os.getpid(), signal.SIGTERM)
