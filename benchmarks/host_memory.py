"""Peak host memory of a piece of work."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil


def peak_growth(
    work: Callable[[], None], *, children: bool = False, anonymous_only: bool = False
) -> tuple[float, float]:
    """Return the seconds of the work, and by how many bytes the resident memory of this process grew at its peak.

    Args:
        work: Function to measure.
        children: True to add the private memory of child processes (sampled every 10 ms).
        anonymous_only: True to exclude file pages, which the kernel may drop (sampled every 10 ms).
    """
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # memory freed by an earlier run would hide growth
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    field = "RssAnon" if anonymous_only else "VmRSS"
    before = _status(field)
    most = 0.0
    has_ended = threading.Event()

    def look() -> None:
        nonlocal most
        while not has_ended.wait(0.01):
            most = max(most, _status(field) + (_private_of_children() if children else 0.0))

    watcher, watched = threading.Thread(target=look), children or anonymous_only
    if watched:
        watcher.start()
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    has_ended.set()
    if watched:
        watcher.join()
    return seconds, max(most, _status(field) if anonymous_only else _status("VmHWM")) - before


def _status(field: str) -> float:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return float(lines[field].split()[0]) * 1024


def _private_of_children() -> float:
    """Return the private bytes of child processes (a fork shares every unchanged page)."""
    total = 0.0
    for child in psutil.Process().children():
        try:
            text = Path(f"/proc/{child.pid}/smaps_rollup").read_text()
        except OSError:  # it has ended
            continue
        total += sum(float(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Private_"))
    return total
