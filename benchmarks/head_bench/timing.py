"""Paired times: every round runs each method once, in random order, and gives one ratio to the base of that round."""

from __future__ import annotations

import ctypes
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

MAX_SPREAD = 0.15
PAGES = ("fresh", "kept")
"""Arguments of ``use_pages``."""
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


@dataclass(frozen=True)
class Ratio:
    """Time over the time of the base in the same round."""

    median: float
    least: float
    most: float
    seconds: float
    """Median seconds of the method itself."""
    rounds: int

    @property
    def spread(self) -> float:
        """Width of the range over the median."""
        return (self.most - self.least) / self.median

    def as_dict(self) -> dict[str, float | int]:
        """Return the ratio for JSON."""
        return asdict(self) | {"spread": self.spread}

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f}..{self.most:.2f})"


def paired_ratios(
    runs: Mapping[str, Callable[[], None]],
    base: str,
    rounds: int,
    *,
    clock: Callable[[Callable[[], None]], float],
    seed: int = 0,
) -> dict[str, Ratio]:
    """Return ratios of all ``runs`` to ``base``, after one run of each to warm up.

    Args:
        runs: name -> one forward and backward pass.
        base: the name of the run to divide by.
        rounds: how often each runs.
        clock: runs what it is given and returns its time.
        seed: of the order; the same on all ranks of a group.
    """
    names = sorted(runs)
    order = random.Random(seed)
    for name in names:
        runs[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in order.sample(names, len(names)):
            gc.collect()
            seconds[name].append(clock(runs[name]))
    ratios = {name: [a / b for a, b in zip(seconds[name], seconds[base], strict=True)] for name in names}
    return {
        name: Ratio(statistics.median(r), min(r), max(r), statistics.median(seconds[name]), rounds)
        for name, r in ratios.items()
    }


def steadiest(measure: Callable[[int], dict[str, Ratio]], attempts: int) -> dict[str, Ratio]:
    """Repeat a whole measurement until no spread is above 15 %; the attempt with the least largest spread counts.

    No ratio is ever made of two attempts.
    """
    best: dict[str, Ratio] | None = None
    for attempt in range(attempts):
        ratios_of_attempt = measure(attempt)
        if best is None or widest(ratios_of_attempt) < widest(best):
            best = ratios_of_attempt
        if widest(best) <= MAX_SPREAD:
            break
    assert best is not None
    return best


def widest(ratios: Mapping[str, Ratio]) -> float:
    """Return the largest spread."""
    return max(ratio.spread for ratio in ratios.values())


def cpu_seconds(run: Callable[[], None]) -> float:
    """Return the CPU seconds of a run in this process, including system time."""
    start = time.process_time()
    run()
    return time.process_time() - start


def use_pages(pages: str) -> None:
    """Choose how this process gets memory: ``fresh``, as it comes, or ``kept``.

    Kept: glibc never gives freed memory back, as CUDA's caching allocator does not. Fresh: every tensor above 32 MiB is
    new memory from the system, and its page faults can be most of the time of a method with many of them.
    """
    if pages == "kept" and sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)
