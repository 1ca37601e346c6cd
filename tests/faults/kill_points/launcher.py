"""Runs as forked children of a process that has imported everything: a second each instead of ten."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import os
import random
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from tests.faults.kill_points import awaits, files
from tests.faults.kill_points.points import Points, descendants, kill
from tests.faults.kill_points.variants import Variant

if TYPE_CHECKING:
    from megatron_dppo.rewards.item import RewardItem

LIMIT_SECONDS = 240.0
_SUBREAPER, _PARENT_DEATH_SIGNAL = 36, 1
KEPT: set[int] = set()
"""Children that are no part of a run."""
Change = Callable[[], None]
"""Code that each process of the program runs before it begins."""


_USED = (
    "commands.main",
    "mcore.checkpoint.save_load",
    "policy.trainer",
    "run.loop",
    "weights.publish",
)
"""Modules that a run imports, and others through these."""


def warm_up() -> None:
    """Import what a run needs and share it with all children; starts no thread."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    from megatron_dppo.mcore.shims import apply_shims
    from megatron_dppo.parallel.platform import Platform

    apply_shims(Platform.detect())
    import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401
    from transformers import AutoTokenizer  # noqa: F401

    for name in _USED:
        importlib.import_module(f"megatron_dppo.{name}")
    from megatron_dppo.config.loss_registry import loss_classes
    from megatron_dppo.run import run_records

    # Kept for the life of a process: each run would build them anew.
    loss_classes()
    # The picture costs more than the run, and nothing is resumed from it.
    mock.patch.object(run_records, "write_curves", lambda metrics, path, title: path.write_bytes(b"picture")).start()
    adopt_orphans()
    gc.collect()
    gc.freeze()


def adopt_orphans() -> None:
    """Become the parent of processes that outlive a killed run, so that they are seen."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


@dataclass(frozen=True)
class Kill:
    """Point and kind of a run's end."""

    point: str | None = None
    """regular expression: the first point whose name it is"""
    whole_tree: bool = True
    lose_writes: bool = False


@dataclass(frozen=True)
class Ended:
    """Outcome of a start."""

    was_killed: bool
    codes: list[int]
    """exit code of each rank; -9 = killed"""
    trace: list[str]
    """the points that were passed, in their order"""
    output: str


def start(variant: Variant, folder: Path, how: Kill, change: Change | None = None) -> Ended:
    """The command of the run, once, until all its ranks have ended."""
    trace = folder / "trace"
    trace.unlink(missing_ok=True)
    port = free_port()
    leader = fork(lambda: _lead(variant, folder, how, change, port))
    deadline = time.monotonic() + LIMIT_SECONDS
    while os.waitpid(leader, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            for pid in descendants(leader):
                kill(pid)
            os.waitpid(leader, 0)
            (folder / "codes").write_text("timeout")
            break
        time.sleep(0.005)
    lines = trace.read_text().splitlines() if trace.is_file() else []
    text = (folder / "codes").read_text() if (folder / "codes").is_file() else ""
    codes = [124] if text == "timeout" else [int(code) for code in text.split()]
    return Ended("KILLED" in lines, codes, [line[2:] for line in lines if line.startswith("P ")], _output(folder))


def _output(folder: Path) -> str:
    return "".join(file.read_text(errors="replace") for file in sorted(folder.glob("output-*")))


def fork(work: Callable[[], int]) -> int:
    """A child that does ``work`` and ends with its exit code."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _lead(variant: Variant, folder: Path, how: Kill, change: Change | None, port: int) -> int:
    """The launcher of the ranks: when one has ended badly it ends the others, as torchrun does."""
    os.setsid()
    (folder / "codes").unlink(missing_ok=True)
    trace = os.open(folder / "trace", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    me, ranks = os.getpid(), {}
    for rank in range(variant.world_size):
        points = Points(folder / "run", trace, rank, how.point, how.whole_tree, how.lose_writes, me)
        pid = fork(lambda rank=rank, points=points: _rank(variant, folder, rank, port, points, change))  # type: ignore[misc]
        ranks[pid] = rank
    codes = [0] * variant.world_size
    left = set(ranks)
    while left:
        pid, status = os.wait()
        if pid not in left:
            continue
        left.remove(pid)
        codes[ranks[pid]] = os.waitstatus_to_exitcode(status)
        if codes[ranks[pid]]:
            for other in left:
                kill(other)
    (folder / "codes").write_text(" ".join(map(str, codes)))
    return 0


def _rank(variant: Variant, folder: Path, rank: int, port: int, points: Points, change: Change | None) -> int:
    import multiprocessing.util

    from megatron_dppo.commands.main import train_main

    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), line_buffering=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), line_buffering=True)
    os.chdir(folder)
    address = {"RANK": rank, "WORLD_SIZE": variant.world_size, "LOCAL_RANK": rank, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in address.items()}
    os.environ |= {"LOCAL_WORLD_SIZE": str(variant.world_size), "MASTER_ADDR": "127.0.0.1"}
    points.main = os.getpid()
    _without_workers()
    if change is not None:
        change()
    files.install(points)
    awaits.install(points)
    code = train_main(["run.toml"])
    points.busy = True
    multiprocessing.util._exit_function()
    return code


def _without_workers() -> None:
    """The reward has workers, which import for seconds and touch no file of the run: here it is a value of the
    characters, so that groups carry signal and evaluations differ.
    """
    from megatron_dppo.rewards.pool import FunctionPool
    from megatron_dppo.rewards.scoring import ScoringOutcome

    def score(self: FunctionPool, item: RewardItem) -> ScoringOutcome:
        return ScoringOutcome(sum(map(ord, item.completion)) % 7 / 7)

    # An error if the class has no such method any more: then nothing would call this one.
    mock.patch.object(FunctionPool, "_quick", score).start()  # reaches: the pool goes on as it is, without workers


def die_with_parent() -> None:
    """End this process when the one that forked it ends."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def free_port() -> int:
    """A port that nobody listens at; below those that the kernel gives to connections."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def left_alive(seconds: float) -> list[int]:
    """Children of killed runs that do not end by themselves; they are ended."""
    deadline = time.monotonic() + seconds
    while (pids := _children()) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in pids:
        kill(pid)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    return pids


def _children() -> list[int]:
    """All children of this process that live, the adopted ones too."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                break
        except ChildProcessError:
            return []
    kept = {os.getpid(), *(pid for server in KEPT for pid in descendants(server))}
    return [pid for pid in descendants(os.getpid()) if pid not in kept]


@contextlib.contextmanager
def workplace(root: Path, name: str) -> Iterator[Path]:
    """A new folder for one run, deleted at the end."""
    folder = root / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
