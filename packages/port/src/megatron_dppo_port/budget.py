"""Limits of time and memory for files that strangers wrote."""

import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from multiprocessing.connection import Connection
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
_steps_left: ContextVar[int | None] = ContextVar("steps_left", default=None)


@contextmanager
def limited() -> Iterator[None]:
    """Give the file that is read inside the block a budget of steps."""
    token = _steps_left.set(_MAX_STEPS)
    try:
        yield
    finally:
        _steps_left.reset(token)


def spend(steps: int) -> None:
    """Count steps of the file that is read before they are made. Outside of ``limited`` nothing is counted."""
    left = _steps_left.get()
    if left is None:
        return
    if left < steps:
        raise ConfigError(f"The file takes more than {_MAX_STEPS:,} steps to read, or as many characters. {_FIX}")
    _steps_left.set(left - steps)


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
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(function, writer))
    child.start()
    writer.close()
    try:
        result, error = reader.recv()
    except EOFError:
        limits = f"{_CPU_SECONDS} seconds of CPU time or {_MEMORY_BYTES >> 20} MiB"
        raise ConfigError(f"The file takes more than {limits} to read. {_FIX}") from None
    finally:
        child.join()
    if error is not None:
        raise error
    return result


def _answer(function: Callable[[], Any], writer: Connection) -> None:
    _limit_process()
    try:
        writer.send((function(), None))
    except Exception as error:
        writer.send((None, error))


def _limit_process() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS + 1))
    # An interrupt, which the parent reports, ends this process without a traceback too.
    for number in (signal.SIGXCPU, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            size = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        # Only Linux limits the address space.
        return
    limit = size + _MEMORY_BYTES
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
