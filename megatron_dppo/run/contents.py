"""Files and folders that a configuration names, compared by what they hold instead of where they are."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_dppo.config.paths import split_function

_FULLY_HASHED = 2**26
"""Bytes up to which a file is hashed as a whole. Of a larger one, ``_BLOCKS`` evenly spaced blocks are."""
_BLOCKS = 64
_BLOCK_BYTES = 2**16


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``section.key`` and value of every key. An empty table counts as a value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def content_digests(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of every existing file and folder that a configuration reads, by ``section.key``.

    Args:
        values: Configuration as nested tables.
    """
    digests = {key: content_digest(value) for key, value in flatten(values) if _is_read(key)}
    return {key: digest for key, digest in digests.items() if digest is not None}


def _is_read(key: str) -> bool:
    return not key.startswith(("run.", "log.", "checkpoint.", "rollout.weight_sync."))


def content_digest(value: Any) -> str | None:
    """Return the digest of the files that a value names. None if it is no existing path.

    Args:
        value: Path of a file or folder, ``path/to/file.py:function``, or a list of such values. The function's name is
            part of the digest, the path is not.
    """
    if isinstance(value, list | tuple):
        digests = [content_digest(part) for part in value]
        return None if not digests or None in digests else _hash("".join(map(str, digests)).encode())
    if not isinstance(value, str) or os.sep not in value:
        return None
    path, function = split_function(value)
    try:
        if os.path.isdir(path):
            folder = Path(path)
            files = sorted(file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
            visible = [file for file in files if not str(file).startswith(".")]  # a download's cache differs
            text = "".join(f"{file.as_posix()} {_file_digest(folder / file)}\n" for file in visible)
        elif os.path.isfile(path):
            text = _file_digest(Path(path))
        else:
            return None
    except (OSError, ValueError):
        return None
    return _hash(f"{text}{function}".encode())


def same_value(old: Any, new: Any, folder: Path, digest: str | None = None) -> bool:
    """Return True if two values of a key are equal, name the same path, or name paths with the same content.

    Args:
        old: Value of the run so far.
        new: Value of this start, relative to the working directory if it is a relative path.
        folder: Folder that ``old`` is relative to, if it is a relative path.
        digest: Content of ``old`` when it was used. None if unknown.
    """
    if old == new:
        return True
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new) and old:
        if all(same_value(*pair, folder) for pair in zip(old, new, strict=True)):
            return True
    elif isinstance(old, str) and isinstance(new, str):
        old_path, old_function = split_function(old)
        new_path, new_function = split_function(new)
        is_same_path = os.path.realpath(folder / old_path) == os.path.realpath(new_path)
        if is_same_path and old_function == new_function:
            return True
    return digest is not None and digest == content_digest(new)


def _file_digest(file: Path) -> str:
    size = file.stat().st_size
    with file.open("rb") as opened:
        if size <= _FULLY_HASHED:
            return _hash(opened.read())
        parts = [str(size).encode()]
        for index in range(_BLOCKS):
            opened.seek((size - _BLOCK_BYTES) * index // (_BLOCKS - 1))
            parts.append(opened.read(_BLOCK_BYTES))
    return _hash(b"".join(parts))


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
