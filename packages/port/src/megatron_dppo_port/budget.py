"""Limits of time and memory for files that strangers wrote."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from megatron_dppo.errors import ConfigError

MAX_FILE_BYTES = 1 << 17
"""Largest file that is read. The longest launch file known has 42 kB."""
_MAX_VALUE = 100_000
"""Longest value in characters."""
_MAX_STEPS = 20_000_000
"""Steps for one file: about one for each character that is made or compared. Published files take below 1,000,000."""
_CPU_SECONDS = 10
_MEMORY_BYTES = 1 << 30
_FIX = "Fix: write the training command alone into a file, with its values"


class Budget:
    """Steps that are left for a file."""

    def __init__(self) -> None:
        self._left = _MAX_STEPS

    def spend(self, steps: int) -> None:
        """Count steps before they are made."""
        self._left -= steps
        if self._left < 0:
            raise ConfigError(f"The file takes more than {_MAX_STEPS:,} steps to read, or as many characters. {_FIX}")


_current: ContextVar[Budget | None] = ContextVar("budget", default=None)


@contextmanager
def limited() -> Iterator[None]:
    """Give the file that is read inside the block a budget."""
    token = _current.set(Budget())
    try:
        yield
    finally:
        _current.reset(token)


def spend(steps: int) -> None:
    """Count steps of the file that is read. Outside of ``limited`` nothing is counted."""
    budget = _current.get()
    if budget is not None:
        budget.spend(steps)


def check_size(num_characters: int) -> None:
    """Refuse a value before it is made."""
    if num_characters > _MAX_VALUE:
        raise ConfigError(f"The file makes a value of more than {_MAX_VALUE:,} characters. {_FIX}")


def call_limited(function: Callable[[], Any]) -> Any:
    """Return the result of a function that runs in a child with a limit of CPU time and of memory.

    The budget counts what Python does. The parsers are C code, whose time is not linear in the text.
    A process with several threads calls the function itself, because a child would inherit their locks.
    """
    if threading.active_count() > 1 or not hasattr(os, "fork"):
        return function()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _answer(function, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) or not answer:
        limits = f"{_CPU_SECONDS} seconds of CPU time or {_MEMORY_BYTES >> 20} MiB"
        raise ConfigError(f"The file takes more than {limits} to read. {_FIX}")
    result, error = pickle.loads(answer)
    if error is not None:
        raise error
    return result


def _answer(function: Callable[[], Any], writer: int) -> None:
    """Write the pickled result or error, and end this process."""
    try:
        _limit_process()
        try:
            answer = pickle.dumps((function(), None))
        except Exception as error:
            answer = pickle.dumps((None, error))
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(answer)
    finally:
        # Nothing of the parent, such as its buffers, may be flushed here, too.
        os._exit(0)


def _limit_process() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS + 1))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            size = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        # Only Linux limits the address space.
        return
    limit = size + _MEMORY_BYTES
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
