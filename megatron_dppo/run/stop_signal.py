"""SIGTERM, SIGINT and SIGHUP as a request to stop after the current step."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from multiprocessing import resource_tracker
from types import FrameType

import torch
import torch.distributed as dist

STOPPED_BY_HAND = 130
"""Exit code after a second SIGINT."""
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SAME_REQUEST_SECONDS = 1.0
"""A launcher may forward a SIGINT that the terminal has sent to all: that is no second one."""


class Stopped(Exception):
    """The run ends as asked; the message says where it goes on."""


class StopSignal:
    """Remembers a signal, so that a step can end and be saved; a context manager for the main thread.

    Inside, the signals are blocked in this thread and so in all that it starts: threads and, over fork and exec,
    processes. A signal to the process group (a terminal's Ctrl-C, a scheduler) therefore does not take away the
    helpers that the step needs: scoring processes, compilers, loggers. One thread receives.

    While ``deferring`` is False, a signal ends the process at once with exit code 0: there is nothing to save yet.
    """

    def __init__(self) -> None:
        self._number, self._interrupted = 0, 0.0
        self.deferring = False
        """whether signals wait for ``requested``"""
        self.name = ""
        """the signal that ``requested`` has found, such as ``SIGTERM``"""

    def __enter__(self) -> StopSignal:
        # What is ignored stays so: nohup, and SIGINT for a job in the background.
        taken = [number for number in _STOPS if signal.getsignal(number) is not signal.SIG_IGN]
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, taken)
        # It unblocks the signals in the thread that starts it, so it must not start later.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, taken)
        self._previous = {number: signal.signal(number, _leave_to_the_thread) for number in taken}
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._receive, args=(taken,), name="stop signal", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._read)
        os.close(self._write)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def requested(self) -> bool:
        """Return True if any rank received a stop signal; a collective of all ranks."""
        device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
        number = torch.tensor(self._number, device=device)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        if number:
            self.name = signal.Signals(int(number)).name
        return bool(number)

    def _receive(self, taken: list[signal.Signals]) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, taken)
        while (number := os.read(self._read, 1)[0]) != 0:
            if number in taken:
                self._note(signal.Signals(number))

    def _note(self, number: signal.Signals) -> None:
        if not self.deferring:
            _say(f"stopped  by {number.name} before the training began; nothing had to be saved")
            os._exit(0)
        now = time.monotonic()
        if number == signal.SIGINT and self._interrupted and now > self._interrupted + _SAME_REQUEST_SECONDS:
            _say("stopped  by a second SIGINT, without a save")
            os._exit(STOPPED_BY_HAND)
        if number == signal.SIGINT and not self._interrupted:
            self._interrupted = now
            _say("SIGINT   the run ends after this step and saves it; a second Ctrl-C ends it at once, without a save")
        elif not self._number:
            _say(f"{number.name:8} the run ends after this step and saves it")
        self._number = self._number or number


def _leave_to_the_thread(number: int, frame: FrameType | None) -> None:
    """Python calls handlers in the main thread, which may be in a long computation; see ``set_wakeup_fd``."""


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        # Not print: the main thread may be in the middle of one. The terminal may be gone, which is no reason to die.
        with suppress(OSError):
            os.write(2, f"{text}\n".encode())
