"""Program that kills the leftover processes of a parent process when the parent exits.

``python -I -S reaper.py PID MARK``. Leftover are:
- every process with ``MEGATRON_DPPO_PROCESS=MARK`` in its initial environment. A daemon that has forked twice and left
  its session inherits it too.
- the processes of a session that such a process leads.
- the processes of the session of PID, if PID led one.

A parent-death signal is not enough. It reaches only direct children, and the kernel sends it when the *thread* that
started them ends. Linux only (``/proc``).
"""

import os
import select
import signal
import sys
import time

VARIABLE = "MEGATRON_DPPO_PROCESS"
_GRACE_SECONDS = 2.0
"""Seconds in which processes may still exit by themselves."""
_KILL_SECONDS = 10.0
"""Seconds of sending SIGKILL. A process that survives it hangs in the kernel."""


def find_leftovers(mark: str, sessions: set[int]) -> list[int]:
    """Return the running processes with the mark or in a session; add the sessions that marked ones lead."""
    variable = f"{VARIABLE}={mark}".encode()
    leftovers = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                is_marked = variable in file.read().split(b"\0")
            session = os.getsid(pid)
            with open(f"/proc/{pid}/stat", "rb") as file:
                state = file.read().rpartition(b")")[2].split()[0]
        except OSError:  # it has exited, or belongs to another user
            continue
        if is_marked and session == pid:
            sessions.add(pid)
        if (is_marked or session in sessions) and state not in (b"Z", b"X") and pid != os.getpid():
            leftovers.append(pid)
    return leftovers


def kill_leftovers(mark: str, sessions: set[int]) -> None:
    """Give leftover processes a short time to exit, then kill them."""
    start = time.monotonic()
    while (pids := find_leftovers(mark, sessions)) and time.monotonic() < start + _GRACE_SECONDS + _KILL_SECONDS:
        if time.monotonic() > start + _GRACE_SECONDS:
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    continue
        time.sleep(0.1)


def wait_for_exit(pid: int) -> None:
    """Wait until ``pid``, the parent of this process, has exited."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:  # it has exited, or the kernel is older than 5.3
        pidfd = -1
    poll = select.poll()
    if pidfd >= 0:
        poll.register(pidfd, select.POLLIN)
    while os.getppid() == pid and not poll.poll(1000):
        continue


def main() -> None:
    """Run the program."""
    pid, mark = int(sys.argv[1]), sys.argv[2]
    # Signals to the parent's job must not end the reaper before it has done its work.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        sessions = {pid} if os.getsid(pid) == pid else set()
    except OSError:
        sessions = set()
    wait_for_exit(pid)
    kill_leftovers(mark, sessions)


if __name__ == "__main__":
    main()
