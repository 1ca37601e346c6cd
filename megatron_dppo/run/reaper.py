"""A small program beside a process: when that has ended, however, it ends what the process has left running.

``python -I -S reaper.py PID MARK``. Left is every process that has ``MEGATRON_DPPO_PROCESS=MARK`` in the environment it
was started with, which also a daemon inherits that has forked twice and left its session; the sessions that such
processes lead; and the session of PID, if it led one. A parent-death signal would reach direct children alone, and is
sent when the *thread* ends that started them. Linux only (``/proc``).
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

VARIABLE = "MEGATRON_DPPO_PROCESS"
_GRACE_SECONDS = 2.0
"""For what is about to end by itself."""
_KILL_SECONDS = 10.0
"""After that, what SIGKILL has not ended hangs in the kernel."""


def left_behind(mark: str, sessions: set[int]) -> list[int]:
    """The processes of the mark and of the sessions; ``sessions`` grows by those that marked processes lead."""
    wanted = f"{VARIABLE}={mark}".encode()
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                marked = wanted in file.read().split(b"\0")
            session = os.getsid(pid)
            with open(f"/proc/{pid}/stat", "rb") as file:
                state = file.read().rpartition(b")")[2].split()[0]
        except OSError:  # it has ended, or is another user's
            continue
        if marked and session == pid:
            sessions.add(pid)
        if (marked or session in sessions) and state not in (b"Z", b"X") and pid != os.getpid():
            found.append(pid)
    return found


def end(mark: str, sessions: set[int]) -> None:
    """Wait shortly for what is left, then kill it."""
    start = time.monotonic()
    while (left := left_behind(mark, sessions)) and time.monotonic() < start + _GRACE_SECONDS + _KILL_SECONDS:
        if time.monotonic() > start + _GRACE_SECONDS:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    continue
        time.sleep(0.1)


def wait_for_end(pid: int) -> None:
    """Until the parent ``pid`` of this process has ended."""
    try:
        ended = os.pidfd_open(pid)
    except OSError:  # it has ended, or the kernel is older than 5.3
        ended = -1
    poll = select.poll()
    if ended >= 0:
        poll.register(ended, select.POLLIN)
    while os.getppid() == pid and not poll.poll(1000):
        continue


def main() -> None:
    """The program."""
    pid, mark = int(sys.argv[1]), sys.argv[2]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        sessions = {pid} if os.getsid(pid) == pid else set()
    except OSError:
        sessions = set()
    wait_for_end(pid)
    end(mark, sessions)


if __name__ == "__main__":
    main()
