"""End a process together with everything that it started."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.process import BaseProcess

_LIMIT_SECONDS = 5.0
"""A process that SIGKILL has not ended by then hangs in the kernel."""


def kill_process_tree(process: BaseProcess | subprocess.Popen[bytes]) -> None:
    """Kill a child that leads a session, with its session, its descendants and their sessions.

    A process that left the session *and* was orphaned (a daemon) is not covered; it ends with the run.
    """
    assert process.pid is not None
    deadline = time.monotonic() + _LIMIT_SECONDS
    sessions = {process.pid}
    # Repeat, because a process may fork between the listing and its SIGKILL.
    while time.monotonic() < deadline:
        members = _members(process.pid, sessions)
        for pid in members:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        # A short wait, in which the killed processes end.
        _wait(process, 0.01)
        if not members:
            break
    _wait(process, None)


def _wait(process: BaseProcess | subprocess.Popen[bytes], timeout: float | None) -> None:
    if isinstance(process, BaseProcess):
        process.join(timeout)
    else:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout)


def _members(root: int, sessions: set[int]) -> list[int]:
    """Return living processes below ``root`` or in one of the sessions, and add the descendants' sessions."""
    table = _processes()
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in table.items():
        children.setdefault(parent, []).append(pid)
    descendants = set[int]()
    stack = [root]
    while stack:
        direct_children = children.get(stack.pop(), [])
        descendants.update(direct_children)
        stack += direct_children
    # A descendant that leads a session brings all of that session.
    sessions.update(pid for pid in descendants if table[pid][1] == pid)
    return [pid for pid, (_, session) in table.items() if pid != root and (pid in descendants or session in sessions)]


def _processes() -> dict[int, tuple[int, int]]:
    """Return parent and session of each living process."""
    if sys.platform != "linux":
        return {}
    table = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with suppress(OSError), open(f"/proc/{pid}/stat", encoding="latin-1") as file:
            # The name of the command, in parentheses, may contain anything.
            state, parent, _, session = file.read().rpartition(")")[2].split()[:4]
            if state not in "ZX":
                table[pid] = int(parent), int(session)
    return table
