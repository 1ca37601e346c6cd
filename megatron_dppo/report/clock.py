"""Wall-clock time of a step by phase, and the current phase of this process."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Progress:
    """The current phase of this process's main thread, for threads that watch it; ``loop`` between two phases.

    ``step`` counts completed rollout steps. ``entered`` is the time of the last of ``changes`` of step or phase.
    """

    def __init__(self) -> None:
        self.step = 0
        self.phase = "start"
        self.changes = 0
        self.entered = time.time()

    def enter(self, phase: str, step: int | None = None) -> str:
        """Begin a phase if this is the main thread, and return the previous one."""
        before = self.phase
        # Background threads use the same clock, but must not change the phase of the main thread.
        if threading.current_thread() is threading.main_thread():
            self.step = self.step if step is None else step
            self.phase = phase
            self.entered = time.time()
            self.changes += 1
        return before

    @contextmanager
    def part(self, phase: str) -> Iterator[None]:
        """Set a phase for the duration of the block, then restore the previous one."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)


PROGRESS = Progress()


class Clock:
    """Wall-clock seconds of one step and of its named parts on this rank.

    On CUDA a part ends when its kernels are queued, unless it waits for a result, as loss and gradient norm do.
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of the block to the part ``name``."""
        start = time.perf_counter()
        try:
            with PROGRESS.part(name):
                yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - start

    def total(self) -> float:
        """Return the seconds since the start of the step."""
        return time.perf_counter() - self._start
