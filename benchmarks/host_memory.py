"""How much host memory a piece of work takes at its peak."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil


def peak_growth(work: Callable[[], None], *, children: bool = False, own: bool = False) -> tuple[float, float]:
    """Seconds, and bytes by which the resident memory of this process was larger than before at its peak.

    Args:
        work: what is measured.
        children: whether to add what processes that it starts hold for themselves (looked at every 10 ms).
        own: whether to leave pages of files out, which the kernel may drop (looked at every 10 ms).
    """
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what an earlier way has freed would serve this one unseen
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    field = "RssAnon" if own else "VmRSS"
    before, most, ended = _status(field), 0.0, threading.Event()

    def look() -> None:
        nonlocal most
        while not ended.wait(0.01):
            most = max(most, _status(field) + (_private_of_children() if children else 0.0))

    watcher, watched = threading.Thread(target=look), children or own
    if watched:
        watcher.start()
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    ended.set()
    if watched:
        watcher.join()
    return seconds, max(most, _status(field) if own else _status("VmHWM")) - before


def _status(field: str) -> float:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return float(lines[field].split()[0]) * 1024


def _private_of_children() -> float:
    """What children do not share with this process (a fork shares all that neither has changed)."""
    total = 0.0
    for child in psutil.Process().children():
        try:
            text = Path(f"/proc/{child.pid}/smaps_rollup").read_text()
        except OSError:  # it has ended
            continue
        total += sum(float(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Private_"))
    return total
