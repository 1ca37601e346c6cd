"""Bytes of a run's files that would survive a loss of power: those that were fsynced.

Every write, fsync and rename is a line in the shared trace; at a kill ``lose`` reads it and cuts off what is not on
the disk. Renames, removals and new directories are taken to be on the disk in their order, as by a journal.
"""

from __future__ import annotations

import os
from pathlib import Path


class Durable:
    """The lines in the trace.

    Args:
        root: only files below it.
        trace: file descriptor, opened to append.
    """

    def __init__(self, root: Path, trace: int) -> None:
        self._root, self._trace = root, trace

    def note(self, kind: str, path: str, other: str | int = "") -> None:
        """``W``: begun anew; ``A``: opened to append; ``S``: synced, both at size ``other``; ``R``: renamed."""
        os.write(self._trace, f"{kind} {path}\t{other}\n".encode())

    def lose(self) -> None:
        """Cut every file down to what was synced."""
        for path, size in self.sizes().items():
            file = self._root / path
            if file.is_file() and file.stat().st_size > size:
                os.truncate(file, size)

    def sizes(self) -> dict[str, int]:
        """Bytes on the disk of each file that was written."""
        sizes: dict[str, int] = {}
        for line in Path(f"/proc/self/fd/{self._trace}").resolve().read_text().splitlines():
            kind, _, rest = line.partition(" ")
            path, _, other = rest.partition("\t")
            if kind == "W":
                sizes[path] = 0
            elif kind == "A":
                sizes.setdefault(path, int(other))
            elif kind == "S":
                sizes[path] = int(other)
            elif kind == "R":
                for known in [p for p in sizes if p == path or p.startswith(path + "/")]:
                    sizes[other + known[len(path) :]] = sizes.pop(known)
        return sizes
