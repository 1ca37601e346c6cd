"""Lock file of a folder, which names its owner: one run at a time.

Two signals show if the owner is alive:
- The kernel's record lock (``fcntl.lockf``, which NFS forwards to its server). It disappears with the process.
- The owner's heartbeat, for file systems without locks between machines. The owner rewrites the file every few
  seconds, and a new process watches the file before it takes it over.

The owner looks at the file before each heartbeat and before each write of a result. If the folder or the file is not
there any more, or names another owner, it exits at once and writes nothing: two runs never write one folder.

An owner that is an earlier attempt of the same Slurm job, on a node that Slurm has given up, exits on request
(``claim``).
"""

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

from megatron_dppo.errors import ConfigError, UserError
from megatron_dppo.files import read_regular_file, try_lock

CLAIM = ".megatron_dppo.claim"
_CLAIMED_EXIT_CODE = 1
"""Exit code of an attempt whose folder a later attempt has claimed. No process waits for it."""
_LOST_EXIT_CODE = UserError.exit_code
"""Exit code of a run whose folder was deleted, renamed or taken over."""


def slurm_attempt() -> dict[str, Any]:
    """Return the Slurm job and the attempt that this process belongs to. Empty outside of Slurm."""
    job = os.environ.get("SLURM_JOB_ID")
    return {} if job is None else {"job": job, "try": int(os.environ.get("SLURM_RESTART_COUNT") or 0)}


def is_earlier(other: Mapping[str, Any]) -> bool:
    """Return True if a process belongs to an earlier attempt of this job."""
    ours = slurm_attempt()
    return bool(ours) and other.get("job") == ours["job"] and int(other.get("try", 0)) < ours["try"]


def claim(folder: Path) -> None:
    """Ask earlier attempts of this job that work in the folder to exit."""
    file = folder / f"{CLAIM}.{os.getpid()}"
    file.write_text(json.dumps(slurm_attempt()))
    file.replace(folder / CLAIM)


def exit_if_claimed(folder: Path) -> None:
    """Exit at once, like ``kill -9``, if a later attempt of this job has claimed the folder."""
    ours = slurm_attempt()
    if not ours:
        return
    try:
        theirs = json.loads(read_regular_file(folder / CLAIM))
        is_later = theirs.get("job") == ours["job"] and int(theirs.get("try", 0)) > ours["try"]
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return
    if is_later:
        print(
            f"lock     attempt {theirs['try']} of job {ours['job']} continues in {folder}; this earlier attempt exits",
            file=sys.stderr,
            flush=True,
        )
        os._exit(_CLAIMED_EXIT_CODE)


LOCK = ".megatron_dppo.lock"
HEARTBEAT_SECONDS = 5.0
CLAIM_SECONDS = 60.0
"""Seconds that an earlier attempt of the same job has to exit. Longer than several heartbeats."""
WATCH_SECONDS = 30.0
"""Seconds to watch for heartbeats of an owner on another machine. Longer than several heartbeats."""


def this_process() -> dict[str, Any]:
    """Return the identity of this process, by which another process can check that it is alive."""
    return {
        "host": socket.gethostname(),
        "machine": _machine_id(),
        "pid": os.getpid(),
        "born": _start_ticks(os.getpid()),
    } | slurm_attempt()


def _machine_id() -> str:
    """Return an id of this boot of this machine and of the PID namespace, in which process ids are comparable."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _start_ticks(pid: int) -> str:
    """Return the start time of a process in kernel ticks. Empty if it does not exist or is a zombie.

    The kernel reuses process ids, so an id alone does not identify a process.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


@dataclass(frozen=True)
class LockMessages:
    """Terms in the messages about a folder and its owner."""

    key: str = "run.output_dir"
    """Configuration key or option that names the folder."""
    owner: str = "run"
    """Noun for the owner of the lock."""
    fix: str = "Choose another folder, or stop that run"
    """Instruction to the user if the folder is in use."""


_RUN_MESSAGES = LockMessages()


class FolderLock:
    """Lock of a folder, held until ``release`` or until this process exits.

    ``note`` is about a previous owner that did not release the lock. Empty if there was none.
    """

    def __init__(
        self,
        folder: Path,
        *,
        messages: LockMessages = _RUN_MESSAGES,
        watch_seconds: float = WATCH_SECONDS,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        self.path = folder / LOCK
        self._messages = messages
        self.note = ""
        self._has_claimed = False
        self._file = self._open()
        try:
            self._acquire(watch_seconds)
        except BaseException:
            os.close(self._file)
            raise
        self._beats = 0
        self._since = time.strftime("%Y-%m-%d %H:%M:%S")
        self._stop = threading.Event()
        self._write_heartbeat()
        self._thread = threading.Thread(
            target=self._write_heartbeats, args=(heartbeat_seconds,), name="folder-lock", daemon=True
        )
        self._thread.start()

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"{self._messages.key}: {self.path} cannot be written: {error.strerror}; choose a folder that this "
                "user can write to"
            ) from error

    def _acquire(self, watch_seconds: float) -> None:
        end = time.monotonic() + CLAIM_SECONDS
        while True:
            is_free = self._try_lock()
            owner = self._read_owner()
            # The last _try_lock is needed: reading the file in _is_alive has released the kernel's lock.
            if not is_free or (owner is not None and self._is_alive(owner, watch_seconds)) or not self._try_lock():
                if owner is None or not is_earlier(owner) or time.monotonic() > end:
                    raise ConfigError(self._in_use_message(owner))
                self._claim(owner)
                continue
            if self._is_current():
                break
            os.close(self._file)  # its owner deleted the file after it was opened here and before it was locked
            self._file = self._open()
        (self.path.parent / CLAIM).unlink(missing_ok=True)
        if owner is not None:
            self.note = (
                f"the {self._messages.owner} that held this folder ({_describe_owner(owner)}) exited without releasing "
                "the lock; continuing"
            )

    def _claim(self, owner: Mapping[str, object]) -> None:
        if not self._has_claimed:
            print(
                f"lock     {self.path} is held by an earlier attempt of this job, {_describe_owner(owner)}; "
                "it is asked to exit",
                flush=True,
            )
            claim(self.path.parent)
            self._has_claimed = True
        time.sleep(HEARTBEAT_SECONDS / 5)

    def _try_lock(self) -> bool:
        """Return True if the kernel grants the lock, or if the file system has no locks and the heartbeat decides."""
        try:
            return try_lock(self._file, fcntl.lockf)
        except OSError as error:
            raise ConfigError(f"{self._messages.key}: {self.path} cannot be locked: {error.strerror}") from error

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._file))
        except OSError:
            return False

    def describe_loss(self) -> str:
        """Return why this process does not own the folder any more. Empty if it does, or if that cannot be read."""
        folder = self.path.parent
        try:
            is_current = os.path.samestat(os.stat(self.path), os.fstat(self._file))
        except (FileNotFoundError, NotADirectoryError):
            if folder.is_dir():
                return f"its lock file {self.path.name} was deleted"
            return "it was deleted or renamed"
        except OSError:
            return ""
        owner = self._read_owner()
        ours = this_process()
        is_ours = owner is None or all(owner[key] == ours[key] for key in ("machine", "pid", "born"))
        if is_current and is_ours:
            return ""
        if is_current and owner is not None:
            return f"{_describe_owner(owner)} has taken it over, since this process sent no heartbeat"
        return f"another {self._messages.owner} has created its lock file {self.path.name} anew"

    def exit_if_lost(self) -> None:
        """Exit at once, like ``kill -9``, if this process does not own the folder any more.

        Everything that an orderly end would still write would go into the folder of another run.
        """
        if reason := self.describe_loss():
            print(
                f"error: the folder {self.path.parent} is no longer that of this {self._messages.owner}: {reason}. "
                f"This {self._messages.owner} ends and writes nothing more. To resume it, bring the folder back with "
                "its checkpoints, make sure that nothing else writes to it, and run the same command",
                file=sys.stderr,
                flush=True,
            )
            os._exit(_LOST_EXIT_CODE)

    def _read_owner(self) -> dict[str, Any] | None:
        """Return the last writer of the file. None if it is empty or unreadable: its owner died while writing."""
        try:
            owner = json.loads(os.pread(self._file, 4096, 0))
        except (ValueError, RecursionError):
            return None
        if not isinstance(owner, dict) or not {"host", "machine", "pid", "born"} <= owner.keys():
            return None
        is_process = type(owner["pid"]) is int and 0 < owner["pid"] < 2**32
        return owner if is_process and all(type(owner[key]) is str for key in ("host", "machine")) else None

    def _is_alive(self, owner: Mapping[str, Any], watch_seconds: float) -> bool:
        # On one machine the process id decides at once.
        if owner["machine"] == _machine_id():
            return bool(owner["born"]) and _start_ticks(owner["pid"]) == owner["born"]
        print(
            f"lock     {self.path} is held by {_describe_owner(owner)}; watching for {watch_seconds:.0f} s for a "
            f"heartbeat of that {self._messages.owner}",
            flush=True,
        )
        first = self._reopen_and_read()
        end = time.monotonic() + watch_seconds
        while time.monotonic() < end:
            time.sleep(min(1.0, watch_seconds / 10))
            if self._reopen_and_read() != first:
                return True
        return False

    def _reopen_and_read(self) -> bytes:
        """Open the file again and return its contents, since NFS asks its server only when a file is opened.

        This releases the kernel's lock: closing any handle of a file drops the process's record locks on it.
        """
        try:
            return read_regular_file(self.path)
        except FileNotFoundError:
            return b""

    def _in_use_message(self, owner: Mapping[str, object] | None) -> str:
        description = _describe_owner(owner) if owner else "another process"
        return (
            f"{self._messages.key} = {str(self.path.parent)!r} is in use by another {self._messages.owner}: "
            f"{description}. {self._messages.fix}. If you are sure that it has exited, delete {self.path}"
        )

    def _write_heartbeat(self) -> None:
        self._beats += 1
        record = this_process() | {"beat": self._beats, "since": self._since}
        # Of one length, so that no reader sees the end of an older, longer record.
        text = json.dumps(record).ljust(512).encode() + b"\n"
        os.pwrite(self._file, text, 0)
        os.ftruncate(self._file, len(text))
        os.fsync(self._file)

    def _write_heartbeats(self, seconds: float) -> None:
        while not self._stop.wait(seconds):
            exit_if_claimed(self.path.parent)
            self.exit_if_lost()
            try:
                self._write_heartbeat()
            except OSError:
                continue  # a full disk ends the run at its next write of a result

    def release(self) -> None:
        """Delete the lock file and release the lock."""
        self._stop.set()
        self._thread.join()
        # A disk that became read-only must not hide the error that ends the run. Closing the handle frees the lock.
        with suppress(OSError):
            if not self.describe_loss():
                self.path.unlink(missing_ok=True)
        os.close(self._file)


def _describe_owner(owner: Mapping[str, object]) -> str:
    return f"process {owner['pid']} on {owner['host']}, since {owner.get('since', 'an unknown time')}"
