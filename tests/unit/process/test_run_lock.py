"""The lock of a folder with real processes: in use, killed, stopped, or on another machine."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dppo.errors import ConfigError
from megatron_dppo.process import lock as lock_module
from megatron_dppo.process.lock import LOCK, FolderLock, this_process

ROOT = Path(__file__).parents[3]
HOLDER = """
import os, sys, time
from pathlib import Path
from megatron_dppo.process.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
if os.fork() == 0:  # as a writer or a reward worker of the run does
    time.sleep(60)
    os._exit(0)
print("held", flush=True)
sys.stdin.readline()
lock.release()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds ``tmp_path``, in a session of its own with a child."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_second_run_is_rejected_until_the_owner_has_exited(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    for stopped in (False, True):
        if stopped:
            holder.send_signal(signal.SIGSTOP)
        with pytest.raises(ConfigError, match=f"process {holder.pid} on .*{LOCK}"):
            FolderLock(tmp_path)
    holder.kill()
    holder.wait()  # its child lives on
    lock = FolderLock(tmp_path)
    assert f"process {holder.pid} on " in lock.note and "exited without releasing the lock" in lock.note
    lock.release()
    assert not (tmp_path / LOCK).exists()


def test_a_released_folder_is_free_without_a_note(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    assert holder.stdin is not None
    holder.stdin.write("\n")
    holder.stdin.flush()
    holder.wait()
    lock = FolderLock(tmp_path)
    assert lock.note == ""
    with pytest.raises(ConfigError, match=f"process {os.getpid()} on"):
        FolderLock(tmp_path)  # of the same process, for which the kernel's lock is no obstacle
    lock.release()


def test_a_reused_process_id_does_not_hold_the_folder(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text(json.dumps(this_process() | {"born": "1"}))
    lock = FolderLock(tmp_path)
    assert "exited without releasing the lock" in lock.note
    lock.release()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": "a"}', "\0" * 100])
def test_an_unreadable_lock_file_is_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK).write_text(text)
    FolderLock(tmp_path).release()


def test_an_owner_on_another_machine_holds_the_folder_while_it_sends_heartbeats(tmp_path: Path) -> None:
    owner = {"host": "node7", "machine": "another", "pid": 5, "born": "9"}
    file, stop = tmp_path / LOCK, threading.Event()

    def live() -> None:
        beat = 0
        while not stop.wait(0.05):
            beat += 1
            file.write_text(json.dumps(owner | {"beat": beat}))

    file.write_text(json.dumps(owner))
    thread = threading.Thread(target=live)
    thread.start()
    try:
        begin = time.monotonic()
        with pytest.raises(ConfigError, match="process 5 on node7"):
            FolderLock(tmp_path, watch_seconds=40)
        assert time.monotonic() - begin < 20, "the first heartbeat is enough"
    finally:
        stop.set()
        thread.join()
    lock = FolderLock(tmp_path, watch_seconds=0.5)
    assert "node7" in lock.note and "exited without releasing the lock" in lock.note
    lock.release()


def test_one_of_two_processes_gets_the_folder_of_a_dead_owner_on_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading the file releases the kernel's lock, which the other process then gets."""
    owner = {"host": "node7", "machine": "another", "pid": 5, "born": "9"}
    (tmp_path / LOCK).write_text(json.dumps(owner))
    read, rivals = lock_module.read_regular_file, []
    code = (
        "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    )

    def read_and_lose(path: Path) -> bytes:
        data = read(path)
        if not rivals:
            command = [sys.executable, "-c", code, str(path)]
            rivals.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            assert rivals[0].stdout.readline() == "1\n"
        return data

    monkeypatch.setattr(lock_module, "read_regular_file", read_and_lose)
    try:
        with pytest.raises(ConfigError, match="in use by"):
            FolderLock(tmp_path, watch_seconds=0.1)
    finally:
        rivals[0].communicate("\n")


def test_only_an_earlier_attempt_of_the_same_job_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = HOLDER.replace(
        "lock = FolderLock(Path(sys.argv[1]))", "lock = FolderLock(Path(sys.argv[1]), heartbeat_seconds=0.2)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "1"}
    old = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert old.stdout is not None and old.stdout.readline() == "held\n"
        for job, number in (("13", "2"), ("12", "1"), ("12", "0"), (None, None)):
            for name, value in (("SLURM_JOB_ID", job), ("SLURM_RESTART_COUNT", number)):
                monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
            with pytest.raises(ConfigError, match=f"process {old.pid} on"):
                FolderLock(tmp_path)
        assert old.poll() is None
        monkeypatch.setenv("SLURM_JOB_ID", "12")
        monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
        lock = FolderLock(tmp_path)
        assert old.wait(10) == 1 and f"process {old.pid} on" in lock.note
        assert old.stderr is not None and "attempt 2 of job 12 continues" in old.stderr.readline()
        lock.release()
        assert not list(tmp_path.iterdir())
    finally:
        os.killpg(old.pid, signal.SIGKILL)
        old.wait()


def test_a_file_that_its_owner_deletes_before_it_is_locked_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / LOCK).touch()
    lockf, calls = fcntl.lockf, []

    def delete_and_lock(file: int, operation: int) -> None:
        calls.append(1)
        if len(calls) == 1:
            (tmp_path / LOCK).unlink()
        lockf(file, operation)

    monkeypatch.setattr(fcntl, "lockf", delete_and_lock)
    held = FolderLock(tmp_path)
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    held.release()


def test_without_kernel_locks_the_owner_in_the_file_holds_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    lock = FolderLock(tmp_path)
    with pytest.raises(ConfigError, match=f"process {os.getpid()} on"):
        FolderLock(tmp_path)
    lock.release()
    (tmp_path / LOCK).write_text(json.dumps(this_process() | {"born": "1"}))
    FolderLock(tmp_path).release()


def test_an_exited_or_zombie_owner_does_not_hold_the_folder(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # it has exited and is a zombie
    lock = FolderLock(tmp_path)
    assert f"process {holder.pid} on" in lock.note
    lock.release()
    (tmp_path / LOCK).write_text(json.dumps(this_process() | {"pid": 2**22 + 1, "born": ""}))
    FolderLock(tmp_path).release()


def test_old_contents_are_replaced_and_the_file_of_a_new_owner_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("x" * 3000)
    lock, handles = FolderLock(tmp_path), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(ConfigError, match=f"process {os.getpid()} on"):
            FolderLock(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == handles
    (tmp_path / LOCK).unlink()
    (tmp_path / LOCK).write_text("of another run, whose user deleted this one's")
    lock.release()
    assert (tmp_path / LOCK).read_text().startswith("of another run")


def test_two_containers_of_one_machine_count_as_two_machines() -> None:
    """A process id of one container is not valid in the other."""
    assert os.readlink("/proc/self/ns/pid") in this_process()["machine"]


def test_heartbeats_continue_after_a_failed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, beats, failed = os.pwrite, [], threading.Event()

    def fail_once(file: int, text: bytes, offset: int) -> int:
        beats.append(text)
        if len(beats) == 2:
            failed.set()
            raise OSError(errno.ENOSPC, "full")
        return pwrite(file, text, offset)

    monkeypatch.setattr(os, "pwrite", fail_once)
    lock = FolderLock(tmp_path, heartbeat_seconds=0.02)
    assert failed.wait(20)
    first, end = (tmp_path / LOCK).read_bytes(), time.monotonic() + 20
    while (tmp_path / LOCK).read_bytes() == first:
        assert time.monotonic() < end
    lock.release()


def test_the_owner_sends_heartbeats(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path, heartbeat_seconds=0.02)
    first, end = (tmp_path / LOCK).read_bytes(), time.monotonic() + 20
    while (tmp_path / LOCK).read_bytes() == first:
        assert time.monotonic() < end
        time.sleep(0.01)
    lock.release()


def test_an_unwritable_lock_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        FolderLock(tmp_path)


OWNERS = """
import os, sys, time
from pathlib import Path
from megatron_dppo.process.lock import FolderLock
children = {}
for folder in map(Path, sys.argv[1:]):
    if child := os.fork():
        children[child] = folder.name
        continue
    FolderLock(folder, heartbeat_seconds=0.1)
    (folder.parent / f"{folder.name}.pid").write_text(str(os.getpid()))
    time.sleep(60)
    os._exit(0)
while children:
    child, status = os.wait()
    print(children.pop(child), os.waitstatus_to_exitcode(status), flush=True)
"""


def test_an_owner_that_lost_its_folder_exits_and_writes_nothing(tmp_path: Path) -> None:
    names = ("deleted", "renamed", "unlocked", "replaced", "taken-over", "untouched")
    folders = {name: tmp_path / name for name in names}
    for folder in folders.values():
        folder.mkdir()
    command = [sys.executable, "-c", OWNERS, *map(str, folders.values())]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    owners = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    pids = {name: _read_pid(tmp_path / f"{name}.pid") for name in names}
    # A process that is stopped looks at the file before the heartbeat that is due when it wakes.
    os.kill(pids["taken-over"], signal.SIGSTOP)
    other = json.dumps({**this_process(), "host": "elsewhere", "machine": "other", "beat": 3})
    shutil.rmtree(folders["deleted"])
    folders["renamed"].rename(tmp_path / "elsewhere")
    (folders["unlocked"] / LOCK).unlink()
    (folders["replaced"] / "new").write_text(other)
    (folders["replaced"] / "new").replace(folders["replaced"] / LOCK)
    (folders["taken-over"] / LOCK).write_text(other)
    os.kill(pids["taken-over"], signal.SIGCONT)
    assert owners.stdout is not None
    codes = dict(owners.stdout.readline().split() for _ in range(len(names) - 1))
    assert codes == dict.fromkeys(set(names) - {"untouched"}, "2")
    os.kill(pids["untouched"], signal.SIGKILL)
    output, errors = owners.communicate()
    assert output == f"untouched {-signal.SIGKILL}\n"
    assert errors.count("is no longer that of this run") == len(codes)
    for text in ("it was deleted or renamed", "was deleted. This", "created its lock file", "elsewhere, since"):
        assert text in errors
    assert not folders["deleted"].exists() and not folders["renamed"].exists()
    assert not (folders["unlocked"] / LOCK).exists()
    for name in ("replaced", "taken-over"):
        assert (folders[name] / LOCK).read_text() == other


def _read_pid(file: Path) -> int:
    end = time.monotonic() + 60
    while not file.exists() or not file.read_text():
        assert time.monotonic() < end
        time.sleep(0.05)
    return int(file.read_text())
