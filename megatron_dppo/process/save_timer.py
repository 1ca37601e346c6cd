"""Checkpoints by time: when one is due, and whether host memory has room to write it in the background."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_FRACTION = 0.05
"""Largest share of the run's time that saves by time may take."""
_MEMORY_FRACTION = 0.5
"""Share of the free host memory that the copies of a save in the background may take."""


class SaveTimer:
    """Decides when a checkpoint is due by time, at the end of a step.

    One is due every ``minutes``. It waits longer if saves would take more than ``MAX_FRACTION`` of the time since the
    start. A save costs what the last one did: the seconds in which training waited for it.
    """

    def __init__(self, minutes: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._minutes = minutes
        self._clock = clock
        self._start = clock()
        self._last_save = self._start
        self._last_cost = 0.0
        self._spent = 0.0

    @property
    def is_enabled(self) -> bool:
        """True if saves by time are configured."""
        return self._minutes is not None

    def is_due(self) -> bool:
        """Return True if a save should begin now."""
        if self._minutes is None:
            return False
        now = self._clock()
        is_time = now - self._last_save >= 60 * self._minutes
        return is_time and self._spent + self._last_cost <= MAX_FRACTION * (now - self._start)

    @contextmanager
    def measure(self, *, by_time: bool) -> Iterator[None]:
        """Measure a save, limited by ``MAX_FRACTION`` if it is ``by_time``. The next is due ``minutes`` later."""
        began = self._clock()
        yield
        self._last_save = self._clock()
        self._last_cost = self._last_save - began
        self._spent += self._last_cost if by_time else 0.0


def has_memory_for_copies(part_bytes: int) -> bool:
    """Return True if every process of this machine can copy its part of a checkpoint to host memory."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return processes * part_bytes <= _MEMORY_FRACTION * available_host_bytes()


def available_host_bytes(root: Path = Path("/")) -> int:
    """Return the host memory that new allocations can use: the machine's, or less if a control group limits it."""
    available = 0
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = 1024 * int(line.split()[1])
    # Every group above sets a limit, too.
    group = _control_group(root)
    while group is not None and group.is_relative_to(root / "sys/fs/cgroup"):
        limit = _read_number(group / "memory.max")
        used = _read_number(group / "memory.current")
        if limit is not None and used is not None:
            available = min(available, limit - used)
        group = group.parent
    return max(0, available)


def _control_group(root: Path) -> Path | None:
    """Return the folder of this process's control group (version 2). None if it has none."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    paths = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    return root / "sys/fs/cgroup" / paths[0] if paths else None


def _read_number(file: Path) -> int | None:
    """Return the number in a file. None if there is no such file, or it says ``max``."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
