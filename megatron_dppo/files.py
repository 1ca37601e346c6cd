"""Files of a run: limits, free space, errors of full disks in one line, synced writes."""

import errno
import fcntl
import os
import re
import resource
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_dppo.errors import CheckpointError, ConfigError, DiskError

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


_UNKNOWN_REASON = 0
"""Code of a write that failed inside a library that does not report the cause."""


_REASONS[_UNKNOWN_REASON] = (
    "a write failed for a reason that its library does not report; usual causes are a full disk or a file size limit"
)


_SHORT_WRITE_TEXTS = ("unexpected pos", "PytorchStreamWriter failed")
"""Messages of torch's file writer when fewer bytes reached the disk than it wrote."""


_MIN_OPEN_FILES = 256
"""Descriptors that a rank needs for libraries, sockets of the other ranks, and its own files."""


_MAX_OPEN_FILES = 2**20
"""Highest soft limit that is set."""


MAX_STATE_BYTES = 2**28
"""Largest file of a run's state that is read: 256 MiB."""


def raise_file_limit() -> int:
    """Raise the soft limit on open files (``ulimit -n``) to the hard limit, and return the limit that holds now.

    A rank has a socket for most other ranks in each process group, and srun passes on a soft limit of often 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A container may allow 10^9, and some programs that a run starts close each possible descriptor one by one.
    wanted = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def require_open_files() -> None:
    """Raise the limit on open files to what the system allows, and check that a run can work with it.

    Raises:
        ConfigError: The hard limit is too low for any run.
    """
    limit = raise_file_limit()
    if limit < _MIN_OPEN_FILES:
        raise ConfigError(
            f"this process may open {limit} files (ulimit -n, hard limit), and a run needs at least {_MIN_OPEN_FILES}. "
            f"Raise the limit: ulimit -Hn {_MIN_OPEN_FILES}, LimitNOFILE of the service, or limits.conf"
        )


def read_regular_file(path: Path, limit: int = MAX_STATE_BYTES) -> bytes:
    """Return the content of a file that others may have written.

    Args:
        path: File, or a link to one.
        limit: Largest size in bytes.

    Raises:
        OSError: It cannot be read, is a pipe, a device or a folder, or is larger.
    """
    # Without O_NONBLOCK, opening a named pipe would wait for a writer.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a file but a pipe, a device or a folder", str(path))
        if status.st_size > limit:
            raise OSError(errno.EFBIG, f"it has {status.st_size} bytes, more than {limit}", str(path))
        return file.read()


_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


def try_lock(file: int, lock: Callable[[int, int], None]) -> bool:
    """Return False if another process has the lock of an open file. On a file system without locks nobody has it.

    Args:
        file: Descriptor.
        lock: ``fcntl.flock`` or ``fcntl.lockf``.
    """
    try:
        lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno not in _NO_LOCKS:
            raise
    return True


def existing_parent(path: Path) -> Path:
    """Return the path itself, or the nearest folder above it that exists."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def require_regular_files(folder: Path) -> None:
    """Check that the files of a model's folder can be opened: a named pipe would wait for a writer forever.

    Raises:
        CheckpointError: A name of a JSON, text or template file is a folder, a pipe, a device or a broken link.
    """
    for path in sorted(folder.glob("*")):
        if path.suffix in (".json", ".jinja", ".txt", ".model") and not path.is_file():
            raise CheckpointError(f"{path} is not a file; copy the folder again")


def is_hub_name(path: str | Path) -> bool:
    """Return True if a path looks like the name of a repository on the Hugging Face hub, and its owner is no folder."""
    parts = str(path).split("/")
    return len(parts) == 2 and all(parts) and not parts[0].startswith((".", "~")) and not Path(parts[0]).exists()


def check_model_folder(path: str | Path, key: str) -> None:
    """Check that a folder has a config.json, and name the download if it is the name of a repository.

    Raises:
        CheckpointError: It has none.
    """
    file = Path(path) / "config.json"
    if file.is_file():
        return
    what = f"{key} = {str(path)!r} is not a Hugging Face folder: {file} is missing. "
    if is_hub_name(path):
        name = Path(path).name
        raise CheckpointError(
            f"{what}Models are read from folders. Fix: hf download {path} --local-dir {name}, then {key} = {name!r}"
        )
    raise CheckpointError(f"{what}Expected config.json, tokenizer files and *.safetensors")


@contextmanager
def usual_rights(file: Path) -> Iterator[None]:
    """Give a file that is written within the rights of any other file of this process.

    The library of safetensors writes a temporary file that only its owner can read, and renames it.
    """
    # The umask cannot be read without being set; a new file shows it.
    file.touch()
    mode = stat.S_IMODE(file.stat().st_mode)
    yield
    file.chmod(mode)


def free_bytes(path: Path) -> int:
    """Return the free bytes for this user on the file system of ``path``, which need not exist."""
    return shutil.disk_usage(existing_parent(path)).free


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            # A file may vanish, and other programs' files may be unreadable.
            with suppress(OSError):
                status = os.lstat(os.path.join(root, name))
                total += status.st_size * stat.S_ISREG(status.st_mode)
    return total


def format_bytes(size: float) -> str:
    """Format a size as in ``1.5 GB``, in powers of 1000 as disks are sold."""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    for unit in units[:-1]:
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} {units[-1]}"


_SAME_COMMAND = "Fix the cause and start the same command again"
MAKE_ROOM = "Free some space and start the same command again"
"""Instruction for a run that has begun: in another folder it would begin anew."""


@contextmanager
def disk_errors(path: Path, what: str, fix: str = _SAME_COMMAND) -> Iterator[None]:
    """Turn the failure of a write into one line with path and free space.

    Libraries wrap the system's error in their own (torch in RuntimeError or a failed future, safetensors in
    SafetensorError, Megatron in CheckpointException), or pass its text on from a child process. So every error in the
    chain of causes is searched.

    Args:
        path: File or folder that is written.
        what: Description of the data, for the message.
        fix: Instruction to the user.

    Raises:
        DiskError: The write failed. Data that existed before is intact.
    """
    try:
        yield
    except DiskError:
        raise
    except BaseException as error:  # Megatron's checkpoint errors are no Exception
        number = _errno(error)
        if number is None:
            raise
        raise DiskError(f"{_message(path, what, number, error)}. {fix}") from error


def _message(path: Path, what: str, number: int, error: BaseException) -> str:
    folder = existing_parent(path)
    try:
        free = f"{format_bytes(free_bytes(path))} free on its file system"
    except OSError:
        free = "its free space cannot be read"
    named = getattr(error, "filename", None)
    file = f" ({named})" if named and str(named) != str(path) else ""
    reason = _REASONS[number] + (f". Its message: {summarize_error(error)}" if number == _UNKNOWN_REASON else "")
    return (
        f"{what} cannot be written to {path}{file}: {reason} ({free}, measured at {folder}). Data written there "
        "before is intact"
    )


def summarize_error(error: BaseException) -> str:
    """Return type and message in one line; of torch's distributed checkpoint errors, those of the first failed rank."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        error = next(iter(failures.values()))[0]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def _errno(error: BaseException) -> int | None:
    """Return the error number of a failed write anywhere in the chain of causes. None for other kinds of errors."""
    visited: set[int] = set()
    pending: list[BaseException] = [error]
    fallback: int | None = None
    while pending:
        current = pending.pop()
        if id(current) in visited:
            continue
        visited.add(id(current))
        if isinstance(current, OSError):
            if current.errno in _REASONS:
                return current.errno
        elif (number := _from_text(str(current))) is not None:
            return number
        elif type(current).__name__ == "CheckpointException" or any(t in str(current) for t in _SHORT_WRITE_TEXTS):
            # torch's distributed checkpoints raise this also on ranks whose writes succeeded, without a cause.
            fallback = _UNKNOWN_REASON
        pending += [e for e in (current.__cause__, current.__context__) if e is not None]
        failures = getattr(current, "failures", None)  # torch's CheckpointException: errors by rank
        if isinstance(failures, dict):
            pending += [e[0] if isinstance(e, tuple) else e for e in failures.values() if e]
        pending += [e for e in getattr(current, "args", ()) if isinstance(e, BaseException)]
    return fallback


def _from_text(text: str) -> int | None:
    if (match := _OS_ERROR.search(text)) and int(match[1]) in _REASONS:
        return int(match[1])
    return next((number for words, number in _TEXTS.items() if words in text), None)


def require_space(path: Path, needed: int, what: str, fix: str = "Free some space or choose another folder") -> None:
    """Check that the disk has enough free space.

    Args:
        path: Target file or folder; need not exist.
        needed: Estimated size in bytes.
        what: Description of the data, for the message.
        fix: Instruction to the user.

    Raises:
        DiskError: Less space is free.
    """
    free = free_bytes(path)
    if free < needed:
        raise DiskError(
            f"{what} needs about {format_bytes(needed)} in {path}, but its file system has {format_bytes(free)} free. "
            f"{fix}"
        )


def fsync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, text: str) -> None:
    """Replace a file atomically and flush it: after a crash it holds the old or the new text."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        # What is left of it would keep a full disk full.
        partial.unlink(missing_ok=True)
        raise
    partial.replace(path)
    # The new name is on the disk only with the entry in its folder.
    fsync(path.parent)


def require_new(file: Path | None, option: str) -> None:
    """Check that a new file can be created.

    Args:
        file: File to create. None skips the check.
        option: Option that names the file, for the message.

    Raises:
        ConfigError: The file exists, or its folder is missing or not writable.
    """
    if file is None:
        return
    parent = file.absolute().parent
    problem = "exists already"
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
        problem = f"cannot be created: {error.strerror}"
    raise ConfigError(f"{option} {str(file)!r} {problem}; name another file")


def write_new(file: Path, text: str) -> None:
    """Write a new file.

    Raises:
        DiskError: The file cannot be written. Nothing is left of it.
    """
    write_new_files([(file, [text])])


def write_new_files(contents: Iterable[tuple[Path, Iterable[str]]]) -> None:
    """Write new files, all or none.

    Raises:
        DiskError: A file cannot be written. Nothing is left of any.
    """
    written: list[Path] = []
    try:
        for file, parts in contents:
            with disk_errors(file, "the result"), file.open("x", encoding="utf-8") as target:
                written.append(file)
                target.writelines(parts)
    except BaseException:
        # They would be in the way of the same command.
        for file in written:
            file.unlink(missing_ok=True)
        raise
