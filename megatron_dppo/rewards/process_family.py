"""End a process with all that it has started."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from typing import Protocol

_LIMIT_SECONDS = 5.0
"""What SIGKILL has not ended by then hangs in the kernel."""


class Process(Protocol):
    """A child, as multiprocessing's are."""

    @property
    def pid(self) -> int | None:
        """Its number."""
        ...

    def kill(self) -> None:
        """SIGKILL."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        ...


def end_family(process: Process) -> None:
    """SIGKILL a child of ours that leads a session, its session, its descendants and the sessions that these lead.

    What has left the session *and* was given up by its parent is not found (a daemon); it ends with the run.
    """
    assert process.pid is not None
    end, sessions = time.monotonic() + _LIMIT_SECONDS, {process.pid}
    while time.monotonic() < end:
        members = _members(process.pid, sessions)
        for pid in members:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.join(0.01)
        if not members:
            break
    process.join()


def _members(root: int, sessions: set[int]) -> list[int]:
    """Living processes below ``root`` or in one of the sessions; the sessions of those below are added."""
    table = _processes()
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in table.items():
        children.setdefault(parent, []).append(pid)
    below, stack = set[int](), [root]
    while stack:
        found = children.get(stack.pop(), [])
        below.update(found)
        stack += found
    sessions.update(pid for pid in below if table[pid][1] == pid)
    return [pid for pid, (_, session) in table.items() if pid != root and (pid in below or session in sessions)]


def _processes() -> dict[int, tuple[int, int]]:
    """Parent and session of each living process."""
    if sys.platform != "linux":
        return {}
    table = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with suppress(OSError), open(f"/proc/{pid}/stat", encoding="latin-1") as file:
            state, parent, _, session = file.read().rpartition(")")[2].split()[:4]
            if state not in "ZX":
                table[pid] = int(parent), int(session)
    return table
