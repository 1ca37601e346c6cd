"""Files and folders that a configuration names, compared by what they hold instead of where they are."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from megatron_dppo.config.paths import is_function_key, split_function
from megatron_dppo.functions import is_function_name
from megatron_dppo.functions.imports import find_module, imported_files, is_installed

Contents = Mapping[str, Mapping[str, str]]
"""Digest of every file that a configuration reads, by ``section.key`` and name.

The name is relative to the folder that the key names, or to that of a function's file. It is empty for the file itself.
"""

_FULLY_HASHED = 2**26
"""Bytes up to which a file is hashed as a whole. Of a larger one, ``_BLOCKS`` evenly spaced blocks are."""
_BLOCKS = 64
_BLOCK_BYTES = 2**16


def flatten(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield ``section.key`` and value of every key. An empty table counts as a value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


class ReadContents(NamedTuple):
    """Contents of the files of a configuration."""

    contents: Contents
    notes: tuple[str, ...]
    """Imports of user functions that the contents do not cover, one message per key."""


def read_contents(values: Mapping[str, object]) -> ReadContents:
    """Read every file and folder that a configuration names, and the modules beside the files of user functions."""
    contents: dict[str, dict[str, str]] = {}
    notes = []
    for key, value in flatten(values):
        if key.startswith(("run.", "log.", "checkpoint.", "rollout.weight_sync.")):
            continue
        if is_function_key(key) and isinstance(value, str) and is_function_name(value):
            contents[key], elsewhere = _function_files(value)
            if elsewhere:
                named = ", ".join(f"{module} ({path})" for module, path in sorted(elsewhere.items()))
                notes.append(
                    f"note     {key} imports {named}: not in the folder of its file, so a resume does not notice "
                    "changes there"
                )
        else:
            contents[key] = _value_files(value)
    return ReadContents({key: files for key, files in contents.items() if files}, tuple(notes))


def _function_files(name: str) -> tuple[dict[str, str], dict[str, Path]]:
    """Return the digests of a function's file and of the files that it imports, and the imports that are elsewhere."""
    module = name.rpartition(":")[0]
    is_path = module.endswith(".py")
    file = Path(module).resolve() if is_path else find_module(module)
    if file is None or not file.is_file():
        return {}, {}
    if not is_path and is_installed(file):
        return {"": _file_digest(file)}, {}  # the versions of its imports are those of the installation
    # Imports of a module start at the folder above its top package.
    root = file.parents[0 if is_path else module.count(".") + (file.name == "__init__.py")]
    imported = imported_files(file, root)
    files = {"": file, **imported.beside}
    return {name: digest for name, path in files.items() if (digest := _digest_or_none(path))}, imported.elsewhere


def _value_files(value: object) -> dict[str, str]:
    """Return the digests of the files that a value names: a path, or a list with paths and other words."""
    if isinstance(value, list | tuple):
        parts = {str(index): _value_files(part) for index, part in enumerate(value)}
        return {
            f"{index}/{name}".rstrip("/"): digest for index, files in parts.items() for name, digest in files.items()
        }
    # A word without a separator is no path.
    if not isinstance(value, str) or os.sep not in value:
        return {}
    files = _files_of_path(value)
    return {name: digest for name, path in files.items() if (digest := _digest_or_none(path))}


def _files_of_path(value: str) -> dict[str, Path]:
    """Return the files that a path names, by name: itself, or those of a folder without hidden and descriptive ones."""
    path = Path(value)
    try:
        if path.is_file():
            return {"": path}
        names = [name.relative_to(path) for name in sorted(path.rglob("*")) if name.is_file()] if path.is_dir() else []
    except (OSError, ValueError):
        return {}
    return {
        name.as_posix(): path / name for name in names if not str(name).startswith(".") and name.suffix not in _UNREAD
    }


_UNREAD = (".md", ".pdf", ".png", ".jpg")
"""Suffixes of descriptive files in the folders of models and data."""
_ELF = b"\x7fELF"


def _digest_or_none(file: Path) -> str | None:
    """Return the digest of a file. None for a program in machine code, such as Python's, and for an unreadable file."""
    try:
        with file.open("rb") as opened:
            is_program = opened.read(len(_ELF)) == _ELF
        return None if is_program else _file_digest(file)
    except OSError:
        return None


def same_value(
    old: object,
    new: object,
    folder: Path,
    before: Mapping[str, str] | None = None,
    now: Mapping[str, str] | None = None,
) -> bool:
    """Return True if two values of a key are equal, name the same path, or name paths with the same content.

    A relative path starts at ``folder`` in ``old`` and at the working directory in ``new``. ``before`` and ``now`` have
    their files, as in ``Contents``; None if they are unknown.
    """
    if old == new:
        return True
    before, now = before or {}, now or {}
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(
            same_value(old[i], new[i], folder, _files_of_entry(before, i), _files_of_entry(now, i))
            for i in range(len(new))
        )
    if not isinstance(old, str) or not isinstance(new, str):
        return False
    old_path, old_function = split_function(old)
    new_path, new_function = split_function(new)
    if old_function != new_function:
        return False
    if os.path.realpath(folder / old_path) == os.path.realpath(new_path):
        return True
    # What a function's file imports is compared by itself.
    return before[""] == now.get("") if "" in before else bool(before) and before == now


def _files_of_entry(files: Mapping[str, str], index: int) -> dict[str, str]:
    """Return the files of one entry of a list, named as if it were the whole value."""
    return {name.partition("/")[2]: digest for name, digest in files.items() if name.partition("/")[0] == str(index)}


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
