"""A folder that all nodes have to see alike: written content, renames and locks."""

import fcntl
import os
import secrets
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]

from megatron_dppo.files import existing_parent
from megatron_dppo_doctor.doctor.job_rank import JobRank
from megatron_dppo_doctor.doctor.network import LIMIT_SECONDS
from megatron_dppo_doctor.doctor.rank_facts import Finding

_VISIBLE_SECONDS = 10.0
"""Time in which another node has to see what was written. NFS caches attributes for 3 to 60 s."""
_SHARED_FIX = "put run.output_dir on a file system that all nodes mount"


def check_shared_folder(folder: Path, store: Store, job: JobRank, hosts: list[str]) -> Iterator[str | Finding]:
    """Check that each node sees rank 0's writes and renames, and is kept out by its lock.

    Rank 0 makes a folder of its own in ``folder`` and removes it at the end. The first rank of each other node reads.
    Every rank runs it; rank 0 yields the results. Of a missing folder the nearest existing parent is taken.
    """
    readers = [hosts.index(host) for host in dict.fromkeys(hosts) if host != hosts[0]]
    if not readers:
        # On one machine the last rank reads, so that the check itself is tried.
        readers = [job.world_size - 1]
    if job.rank == 0:
        yield from _write_and_collect(folder, store, readers, hosts)
    elif job.rank in readers:
        _read(store, job.rank)


def _write_and_collect(folder: Path, store: Store, readers: list[int], hosts: list[str]) -> Iterator[str | Finding]:
    folder = existing_parent(folder)
    work = folder.resolve() / f".megatron_dppo_doctor_{secrets.token_hex(8)}"
    token = secrets.token_hex(16)
    try:
        work.mkdir(mode=0o700)
    except OSError as error:
        store.set("files/folder", "")
        yield Finding(f"{folder} on {hosts[0]}: {error.strerror}", "choose a run.output_dir that can be written")
        return
    try:
        (work / "written").write_text(token)
        (work / "renamed").write_text("before")
        lock = os.open(work / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            yield Finding(
                f"{folder}: lock on {hosts[0]}: {error.strerror}", "mount it with locks (NFS 4; Lustre with -o flock)"
            )
        store.set("files/token", token)
        store.set("files/folder", str(work))
        # Readers have the old content in their cache before the rename.
        store.wait([f"files/{rank}/ready" for rank in readers], timedelta(seconds=LIMIT_SECONDS))
        (work / "new").write_text(token)
        os.replace(work / "new", work / "renamed")
        store.set("files/renamed", "")
        delays = []
        for rank in readers:
            problem, delay = store.get(f"files/{rank}/result").decode().split("\n")
            if problem:
                yield Finding(f"{folder} on {hosts[rank]}: {problem}", _SHARED_FIX)
            else:
                delays.append(float(delay))
        os.close(lock)
        if delays:
            yield (
                f"shared folder {folder}: {len(delays)} of {len(readers)} readers saw writes and renames after at most "
                f"{max(delays):.1f} s, and its lock"
            )
    finally:
        for name in ("written", "renamed", "new", "lock"):
            (work / name).unlink(missing_ok=True)
        work.rmdir()


def _read(store: Store, rank: int) -> None:
    text = store.get("files/folder").decode()
    if not text:
        return
    work, token = Path(text), store.get("files/token").decode()
    delay, problem = 0.0, ""
    if not _appears(work / "written", token):
        problem = f"what rank 0 wrote does not appear within {_VISIBLE_SECONDS:.0f} s"
    store.set(f"files/{rank}/ready", "")
    store.wait(["files/renamed"], timedelta(seconds=LIMIT_SECONDS))
    start = time.monotonic()
    if not problem and not _appears(work / "renamed", token):
        problem = f"a file that rank 0 replaced has its old content after {_VISIBLE_SECONDS:.0f} s"
    delay = time.monotonic() - start
    if not problem and not is_locked(work / "lock"):
        problem = f"{socket.gethostname()} gets a lock that rank 0 holds, so two runs could write one folder"
    store.set(f"files/{rank}/result", f"{problem}\n{delay}")


def _appears(path: Path, content: str) -> bool:
    end = time.monotonic() + _VISIBLE_SECONDS
    while time.monotonic() < end:
        try:
            if path.read_text() == content:
                return True
        except OSError:
            pass
        time.sleep(0.1)
    return False


def is_locked(path: Path) -> bool:
    """Return True if another process holds a lock on the file."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
