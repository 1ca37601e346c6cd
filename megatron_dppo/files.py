"""Files of a run: free space, errors of full disks in one line, writes that are synced, files that a wheel ships."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_dppo.errors import ConfigError, DiskError, UserError

_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "the file would exceed the limit on file sizes (ulimit -f)",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "no right to write there",
    errno.EPERM: "no right to write there",
    errno.EIO: "the device reports an input/output error",
    errno.ENOTDIR: "a part of the path is a file",
    errno.EISDIR: "there is a folder of that name",
    errno.ENOENT: "the folder is gone",
    errno.EMFILE: "this process may not open more files (ulimit -n)",
    errno.ENFILE: "this machine may not open more files",
    errno.ENAMETOOLONG: "its name is too long",
    errno.ESTALE: "the network file system has lost it (stale handle)",
}


_TEXTS = {os.strerror(number): number for number in _REASONS}


_OS_ERROR = re.compile(r"os error (\d+)")


_UNTOLD = 0
"""A write that failed inside a library that does not say why."""


_REASONS[_UNTOLD] = "a write failed, and its library does not say why; a full disk or a file size limit is usual"


_UNTOLD_TEXTS = ("unexpected pos", "PytorchStreamWriter failed")
"""What torch's file writer says when fewer bytes arrived than it wrote."""


def existing_parent(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def free_bytes(path: Path) -> int:
    """What this user may still write on the file system where ``path`` is or would be."""
    return shutil.disk_usage(existing_parent(path)).free


def in_words(size: float) -> str:
    """``1.5 GB``; powers of 1000, as disks are sold."""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    for unit in units[:-1]:
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} {units[-1]}"


@contextmanager
def disk_errors(path: Path, what: str) -> Iterator[None]:
    """Turn the failure of a write into one line with path and free space.

    Libraries wrap the system's error in their own (torch in RuntimeError or a failed future, safetensors in
    SafetensorError, Megatron in CheckpointException), or pass its text on from a child process: the reason is looked
    for along the whole chain.

    Args:
        path: the file or folder that is written.
        what: in words, for the message.

    Raises:
        DiskError: nothing that stood there before was harmed.
    """
    try:
        yield
    except DiskError:
        raise
    except BaseException as error:  # Megatron's checkpoint errors are no Exception
        number = _errno(error)
        if number is None:
            raise
        raise DiskError(_message(path, what, number, error)) from error


def _message(path: Path, what: str, number: int, error: BaseException) -> str:
    place = existing_parent(path)
    try:
        free = f"{in_words(free_bytes(path))} free on its file system"
    except OSError:
        free = "its free space cannot be read"
    named = getattr(error, "filename", None)
    file = f" ({named})" if named and str(named) != str(path) else ""
    reason = _REASONS[number] + (f". It says {in_one_line(error)}" if number == _UNTOLD else "")
    return (
        f"{what} cannot be written to {path}{file}: {reason} ({free}, seen at {place}). What was written there before "
        "is untouched; make room or mend it, and start the same command again"
    )


def in_one_line(error: BaseException) -> str:
    """Type and message; of the first rank that failed, when torch's distributed checkpoint collected them."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        error = next(iter(failures.values()))[0]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def _errno(error: BaseException) -> int | None:
    """The reason of a failed write, anywhere in the chain of causes; None = it is another kind of error."""
    seen: set[int] = set()
    waiting: list[BaseException] = [error]
    found: int | None = None
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, OSError):
            if current.errno in _REASONS:
                return current.errno
        elif (number := _from_text(str(current))) is not None:
            return number
        elif type(current).__name__ == "CheckpointException" or any(t in str(current) for t in _UNTOLD_TEXTS):
            found = _UNTOLD  # torch's distributed checkpoints; on ranks whose own writes went well it has no cause
        waiting += [e for e in (current.__cause__, current.__context__) if e is not None]
        failures = getattr(current, "failures", None)  # torch's CheckpointException: what failed, by rank
        if isinstance(failures, dict):
            waiting += [e[0] if isinstance(e, tuple) else e for e in failures.values() if e]
        waiting += [e for e in getattr(current, "args", ()) if isinstance(e, BaseException)]
    return found


def _from_text(text: str) -> int | None:
    if (match := _OS_ERROR.search(text)) and int(match[1]) in _REASONS:
        return int(match[1])
    return next((number for words, number in _TEXTS.items() if words in text), None)


def require_space(path: Path, needed: int, what: str) -> None:
    """Refuse to begin something that the disk cannot hold.

    Args:
        path: where it will be written; need not exist.
        needed: bytes, an estimate.
        what: in words, for the message.

    Raises:
        DiskError: there is less.
    """
    free = free_bytes(path)
    if free < needed:
        raise DiskError(
            f"{what} needs about {in_words(needed)} in {path}, but its file system has {in_words(free)} free; make "
            "room, or choose another folder"
        )


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


def shipped_folder(name: str, package: Path = Path(__file__).parent) -> Path:
    """Return the folder ``examples`` or ``launch``.

    A checkout has it beside the package; in a wheel it is in ``megatron_dppo/shipped`` (setup.py).

    Args:
        name: of the folder.
        package: folder of the package's code.

    Raises:
        UserError: it is not there.
    """
    inside, beside = package / "shipped" / name, package.parent / name
    if inside.is_dir():
        return inside
    # The folder of all packages may have an "examples" of somebody else's.
    if beside.is_dir() and (package.parent / "setup.py").is_file():
        return beside
    raise UserError(f"no {name}/ in {inside.parent} or beside a checkout's setup.py: install the package again")


def require_new(file: Path | None, option: str) -> None:
    """Whether a file can be made there; None = none is wanted.

    Args:
        file: that is to be made.
        option: what named it, for the message.

    Raises:
        ConfigError: it exists, or its folder does not or is not to be written to.
    """
    if file is None:
        return
    parent, problem = file.absolute().parent, "exists already"
    try:
        os.lstat(file)
    except (FileNotFoundError, NotADirectoryError):
        if not parent.is_dir():
            problem = "is in a folder that does not exist"
        elif not os.access(parent, os.W_OK):
            problem = "is in a folder that this user cannot write to"
        else:
            return
    except OSError as error:
        problem = f"cannot be made: {error.strerror}"
    raise ConfigError(f"{option} {str(file)!r} {problem}; name another file")


def write_new(file: Path, text: str) -> None:
    """Write it.

    Raises:
        DiskError: it cannot be written.
    """
    with disk_errors(file, "the result"), file.open("x", encoding="utf-8") as target:
        target.write(text)
