"""Where the seconds of a step go, and what this process is doing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Progress:
    """What the main thread of this process is doing, for those who watch it from another one.

    Attributes:
        step: rollout steps done; in the warm-up, its steps.
        phase: such as ``rollout`` or ``forward_backward``; between two of them, ``loop``.
        changes: how often one of the two has changed.
        entered: ``time.time()`` of the last change.
    """

    def __init__(self) -> None:
        self.step, self.phase, self.changes, self.entered = 0, "start", 0, time.time()

    def enter(self, phase: str, step: int | None = None) -> str:
        """Begin a phase, if this is the main thread; returns the one before."""
        before = self.phase
        if threading.current_thread() is threading.main_thread():
            self.step = self.step if step is None else step
            self.phase, self.entered = phase, time.time()
            self.changes += 1
        return before

    @contextmanager
    def part(self, phase: str) -> Iterator[None]:
        """A phase, and then the one before again."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)


PROGRESS = Progress()
"""Of this process."""


class Clock:
    """Wall-clock seconds of one step, and of its named parts on this rank.

    On CUDA a part ends when its kernels are queued, unless it waits for a result itself, as the loss and the gradient
    norm do.
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What runs inside counts as ``name``; several blocks of one name add up."""
        start = time.perf_counter()
        try:
            with PROGRESS.part(name):
                yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - start

    def total(self) -> float:
        """Seconds since the start of the step."""
        return time.perf_counter() - self._start
