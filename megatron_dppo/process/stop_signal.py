"""SIGTERM, SIGINT, SIGHUP and the job's time limit as a request to stop after the current step."""

import os
import signal
import threading
import time
from contextlib import suppress
from multiprocessing import resource_tracker
from types import FrameType
from typing import Self

import torch
import torch.distributed as dist

from megatron_dppo.process import time_limit

STOPPED_BY_HAND = 130
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_TIME_LIMIT = 1000
"""Number of the request by the time limit, beside those of signals."""
_SAME_REQUEST_SECONDS = 1.0
"""Seconds in which a further SIGINT counts as the same one: a launcher may forward what the terminal sent to all."""


class Stopped(Exception):
    """End of a run after a request to stop; the message says from which step it resumes."""

    def __init__(self, message: str, exit_code: int = 0) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class StopSignal:
    """Context manager of the main thread that records a stop signal, so that the step can finish and be saved.

    In the context, the signals are blocked in this thread, and so in all threads and processes that it starts. A signal
    to the process group (Ctrl-C in a terminal, a scheduler) therefore does not end the processes that the step needs:
    scoring processes, compilers, loggers. One thread receives the signals.

    Attributes:
        deferring: True if a signal waits for ``requested``. While it is False, a signal ends the process at once with
            exit code 0: there is nothing to save yet.
        name: Reason that ``requested`` has reported, such as ``SIGTERM``. Empty before.
        exit_code: Exit code of a run that stops for this reason.
    """

    def __init__(self) -> None:
        self._number = 0
        self._interrupted = 0.0
        self.deferring = False
        self.name = ""
        self.exit_code = 0

    def __enter__(self) -> Self:
        # Ignored signals stay ignored: nohup, and SIGINT for a background job.
        handled = [number for number in _STOPS if signal.getsignal(number) is not signal.SIG_IGN]
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, handled)
        # The resource tracker unblocks the signals in the thread that starts it. So it starts here, before they are
        # blocked once more.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, handled)
        self._previous = {number: signal.signal(number, _ignore_in_main_thread) for number in handled}
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._receive, args=(handled,), name="stop signal", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        # No signal has the number 0, which ends the thread.
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._read)
        os.close(self._write)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def request_by_time_limit(self) -> None:
        """Request a stop because the job's time limit leaves no time for another step."""
        self._number = _TIME_LIMIT

    def requested(self) -> bool:
        """Return True if any rank received a stop signal or has no time left; a collective of all ranks."""
        device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
        number = torch.tensor(self._number, device=device)
        # The largest number, so that all ranks name the same reason.
        dist.all_reduce(number, dist.ReduceOp.MAX)
        if number == _TIME_LIMIT:
            self.name = "the job's time limit"
            self.exit_code = time_limit.EXIT_CODE
        elif number:
            self.name = signal.Signals(int(number)).name
        return bool(number)

    def _receive(self, handled: list[signal.Signals]) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
        # Python's own handler writes the number of each signal into the pipe.
        while (number := os.read(self._read, 1)[0]) != 0:
            if number in handled:
                self._handle(signal.Signals(number))

    def _handle(self, number: signal.Signals) -> None:
        if not self.deferring:
            _write_message(f"stopped  by {number.name} before the training began; nothing had to be saved")
            os._exit(0)
        now = time.monotonic()
        if number == signal.SIGINT and self._interrupted and now > self._interrupted + _SAME_REQUEST_SECONDS:
            _write_message("stopped  by a second SIGINT, without a save")
            os._exit(STOPPED_BY_HAND)
        if number == signal.SIGINT and not self._interrupted:
            self._interrupted = now
            _write_message(
                "SIGINT   the run ends after this step and saves it; a second Ctrl-C ends it at once, without a save"
            )
        elif not self._number:
            _write_message(f"{number.name:8} the run ends after this step and saves it")
        self._number = self._number or number


def _ignore_in_main_thread(number: int, frame: FrameType | None) -> None:
    """Do nothing: Python calls handlers in the main thread, which may be busy. The thread reads ``set_wakeup_fd``."""


def _write_message(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        # Not print: the main thread may be in a print call. A closed terminal must not end the run.
        with suppress(OSError):
            os.write(2, f"{text}\n".encode())
