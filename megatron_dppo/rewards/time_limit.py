"""A time limit that counts a process's own time: a wait for a CPU on a loaded machine is not charged to it."""

import time
from contextlib import suppress
from typing import NamedTuple

_CHECK_SECONDS = 0.1
"""Time between two checks of a process that waits for a CPU at its limit."""


class TimeLimit:
    """Limit on the wall time of a process's main thread from now on, less the time in which it waited for a CPU."""

    def __init__(self, pid: int, seconds: float) -> None:
        self._pid = pid
        self._begin = time.monotonic()
        self._seconds = seconds
        self._first = self._last = read_cpu_use(pid)
        self._last_check = self._begin
        self.deadline = self._begin + seconds
        """Time (``time.monotonic()``) at which to call ``extend``."""

    def extend(self) -> bool:
        """Move the deadline if the process waited for a CPU; return False if its time is over.

        Linux counts a wait only when it is over. So a process that is runnable, and has hardly run since the last
        check, is taken to be waiting now.
        """
        now = time.monotonic()
        use = read_cpu_use(self._pid)
        deadline = self._begin + self._seconds + use.waited - self._first.waited
        # Hardly running: less than half of the time since the last check.
        is_waiting = use.is_runnable and use.ran - self._last.ran < (now - self._last_check) / 2
        self._last = use
        self._last_check = now
        self.deadline = deadline if deadline > now else now + _CHECK_SECONDS
        return deadline > now or is_waiting


class CpuUse(NamedTuple):
    """CPU use of a process's main thread since its start."""

    ran: float = 0.0
    waited: float = 0.0
    """Seconds of completed waits for a CPU."""
    is_runnable: bool = False
    """True if the thread runs or waits for a CPU now."""


def read_cpu_use(pid: int) -> CpuUse:
    """Return the CPU use of a process; all zeros if the system does not report it (macOS, or an ended process)."""
    with suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{pid}/schedstat", encoding="ascii") as file:
            ran, waited = file.read().split()[:2]
        with open(f"/proc/{pid}/stat", encoding="latin-1") as file:
            # The name of the command may contain spaces and parentheses.
            state = file.read().rpartition(")")[2].split()[0]
        return CpuUse(int(ran) / 1e9, int(waited) / 1e9, state == "R")
    return CpuUse()
