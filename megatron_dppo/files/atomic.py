"""Files that are either the old or the new one after a crash."""

from __future__ import annotations

import os
from pathlib import Path


def fsync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, text: str) -> None:
    """Replace a file at once by one that is on the disk: what is there after a crash is the old or the new text."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    fsync(path.parent)
