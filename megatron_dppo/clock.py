"""Where the seconds of a step go."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


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
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - start

    def total(self) -> float:
        """Seconds since the start of the step."""
        return time.perf_counter() - self._start
