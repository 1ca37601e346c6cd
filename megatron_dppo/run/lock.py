"""One run at a time in a folder: a lock file that names its owner.

Two things show whether an owner lives. A record lock of the kernel (``fcntl.lockf``, which NFS passes on to its server)
goes when its process dies, however it dies. Where the file system keeps no such locks between machines, the owner's
heartbeat counts: it rewrites the file every few seconds, and a newcomer watches the file before it takes it over. An
owner that is an earlier try of the same Slurm job, on a node that Slurm has given up, is told to end (``claim``).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dppo.errors import ConfigError

CLAIM = ".megatron_dppo.claim"


_LOST = 1
"""Exit code of a try that was told to end. Nobody waits for it."""


def this_try() -> dict[str, Any]:
    """Which try of which Slurm job this process belongs to; empty outside of Slurm."""
    job = os.environ.get("SLURM_JOB_ID")
    return {} if job is None else {"job": job, "try": int(os.environ.get("SLURM_RESTART_COUNT") or 0)}


def is_earlier(other: Mapping[str, Any]) -> bool:
    """Return True if a process belongs to an earlier attempt of this job."""
    ours = this_try()
    return bool(ours) and other.get("job") == ours["job"] and int(other.get("try", 0)) < ours["try"]


def claim(folder: Path) -> None:
    """Tell earlier tries of our job that work in the folder to end."""
    file = folder / f"{CLAIM}.{os.getpid()}"
    file.write_text(json.dumps(this_try()))
    file.replace(folder / CLAIM)


def withdraw(folder: Path) -> None:
    """The folder is ours."""
    (folder / CLAIM).unlink(missing_ok=True)


def end_if_claimed(folder: Path) -> None:
    """End this process at once, as by ``kill -9``, when a later try of our job wants the folder."""
    ours = this_try()
    if not ours:
        return
    try:
        theirs = json.loads((folder / CLAIM).read_bytes())
    except (OSError, ValueError):
        return
    if theirs.get("job") == ours["job"] and theirs.get("try", 0) > ours["try"]:
        print(
            f"lock     try {theirs['try']} of job {ours['job']} goes on in {folder}, and this one, cut off, ends",
            file=sys.stderr,
            flush=True,
        )
        os._exit(_LOST)


LOCK = ".megatron_dppo.lock"


HEARTBEAT_SECONDS = 5.0


CLAIM_SECONDS = 60.0
"""Seconds that an earlier attempt of the same job has to exit. Longer than several heartbeats."""


WATCH_SECONDS = 30.0
"""Seconds to watch for heartbeats of an owner on another machine. Longer than several heartbeats."""


_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


def this_process() -> dict[str, Any]:
    """Return the identity of this process, by which another process can check that it is alive."""
    return {
        "host": socket.gethostname(),
        "machine": _machine(),
        "pid": os.getpid(),
        "born": _birth(os.getpid()),
    } | this_try()


def _machine() -> str:
    """This boot of this machine, and this container's view of its processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _birth(pid: int) -> str:
    """When a process began, in the kernel's ticks: process ids are used again. Empty when there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


@dataclass(frozen=True)
class Words:
    """Words of the messages about a folder and its owner."""

    key: str = "run.output_dir"
    """Configuration key or option that names the folder."""
    owner: str = "run"
    way_out: str = "Choose another folder, or stop that run"


_OF_A_RUN = Words()


class FolderLock:
    """Holds a folder until ``release``, or until this process ends.

    Args:
        folder: an existing folder.
        words: for messages.
        watch_seconds: how long to look for heartbeats of an owner on another machine.

    Raises:
        ConfigError: somebody else works in the folder, or the lock file cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        words: Words = _OF_A_RUN,
        watch_seconds: float = WATCH_SECONDS,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        self.path = folder / LOCK
        self._words = words
        self.note = ""
        """what happened to an owner that did not let go; empty = there was none"""
        self._has_claimed = False
        self._file = self._open()
        try:
            self._take(watch_seconds)
        except BaseException:
            os.close(self._file)
            raise
        self._beats, self._since = 0, time.strftime("%Y-%m-%d %H:%M:%S")
        self._stop = threading.Event()
        self._beat()
        self._thread = threading.Thread(
            target=self._beat_until_stopped, args=(heartbeat_seconds,), name="folder-lock", daemon=True
        )
        self._thread.start()

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"{self._words.key}: {self.path} cannot be written: {error.strerror}; choose a folder that this "
                "user can write to"
            ) from error

    def _take(self, watch_seconds: float) -> None:
        end = time.monotonic() + CLAIM_SECONDS
        while True:
            is_free, owner = self._try_lock(), self._owner()
            if not is_free or (owner is not None and self._lives(owner, watch_seconds)) or not self._try_lock():
                if owner is None or not is_earlier(owner) or time.monotonic() > end:
                    raise ConfigError(self._refusal(owner))
                self._claim(owner)
                continue
            if self._is_current():
                break
            os.close(self._file)  # its owner deleted the file between our opening and our locking it
            self._file = self._open()
        withdraw(self.path.parent)
        if owner is not None:
            self.note = (
                f"the {self._words.owner} that held this folder ({_named(owner)}) is gone without a word; going on"
            )

    def _claim(self, owner: dict[str, Any]) -> None:
        if not self._has_claimed:
            print(
                f"lock     {self.path} is of an earlier try of this job, {_named(owner)}; telling it to end", flush=True
            )
            claim(self.path.parent)
            self._has_claimed = True
        time.sleep(HEARTBEAT_SECONDS / 5)

    def _try_lock(self) -> bool:
        """Return True if the kernel grants the lock, or if the file system has no locks and the heartbeat decides."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return True
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise ConfigError(f"{self._words.key}: {self.path} cannot be locked: {error.strerror}") from error
        return True

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._file))
        except OSError:
            return False

    def _owner(self) -> dict[str, Any] | None:
        """Return the last writer of the file. None if it is empty or unreadable: its owner died while writing."""
        try:
            owner = json.loads(os.pread(self._file, 4096, 0))
        except ValueError:
            return None
        return owner if isinstance(owner, dict) and {"host", "machine", "pid", "born"} <= owner.keys() else None

    def _lives(self, owner: dict[str, Any], watch_seconds: float) -> bool:
        if owner["machine"] == _machine():
            return bool(owner["born"]) and _birth(owner["pid"]) == owner["born"]
        print(
            f"lock     {self.path} is of {_named(owner)}; watching for {watch_seconds:.0f} s whether that "
            f"{self._words.owner} lives",
            flush=True,
        )
        first, end = self._read_again(), time.monotonic() + watch_seconds
        while time.monotonic() < end:
            time.sleep(min(1.0, watch_seconds / 10))
            if self._read_again() != first:
                return True
        return False

    def _read_again(self) -> bytes:
        """The file as its server has it: NFS looks there when a file is opened. Gives up our record lock."""
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return b""

    def _refusal(self, owner: dict[str, Any] | None) -> str:
        who = _named(owner) if owner else "another process"
        return (
            f"{self._words.key} = {str(self.path.parent)!r} is in use by another {self._words.owner}: {who}. "
            f"{self._words.way_out}. When you are sure that it is dead, delete {self.path}"
        )

    def _beat(self) -> None:
        self._beats += 1
        record = this_process() | {"beat": self._beats, "since": self._since}
        text = json.dumps(record).ljust(512).encode() + b"\n"
        os.pwrite(self._file, text, 0)
        os.ftruncate(self._file, len(text))
        os.fsync(self._file)

    def _beat_until_stopped(self, seconds: float) -> None:
        while not self._stop.wait(seconds):
            end_if_claimed(self.path.parent)
            try:
                self._beat()
            except OSError:
                continue  # a full disk ends the run where it writes something that counts

    def release(self) -> None:
        """Let go, and delete the lock file."""
        self._stop.set()
        self._thread.join()
        # A disk that became read-only must not hide why the run ends; the kernel's lock goes with the handle.
        with suppress(OSError):
            if self._is_current():
                self.path.unlink(missing_ok=True)
        os.close(self._file)


def _named(owner: dict[str, Any]) -> str:
    return f"process {owner['pid']} on {owner['host']}, since {owner.get('since', 'an unknown time')}"
