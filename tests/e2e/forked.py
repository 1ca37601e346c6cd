"""Training runs forked from a process that has imported everything: eight seconds less a run than ``torchrun``.

The ranks are as torchrun's: own processes and environment, ``env://`` rendezvous, the others ended when one fails.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

import psutil
import torch.distributed as dist

from tests.warm import preload

GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL for the ranks that are left, torchrun's own."""


def train_forked(
    arguments: list[str],
    environment: dict[str, str],
    processes: int,
    timeout: float,
    *,
    entry: Literal["train", "main"] = "train",
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """``python -m megatron_dppo.train ARGUMENTS`` in so many ranks; output and exit code are as ``torchrun``'s.

    Args:
        arguments: of ``megatron_dppo.train``.
        environment: of the processes, whole.
        processes: number of ranks.
        timeout: seconds until they are ended.
        entry: ``main`` runs ``megatron-dppo ARGUMENTS`` instead.
        cwd: working directory. None uses this process's.

    Raises:
        TimeoutError: they ran longer.
    """
    with _ranks(arguments, environment, processes, entry, cwd) as (folder, ranks):
        try:
            _join(ranks, time.monotonic() + timeout)
        finally:
            _end(ranks)
        codes = [rank.exitcode or 0 for rank in ranks]
        output, errors = (_read(folder, name) for name in ("out", "err"))
    failed = next((code for code in codes if code), 0)
    return subprocess.CompletedProcess(arguments, 1 if failed and processes > 1 else failed, output, errors)


def kill_forked_when(
    happened: Callable[[], bool], arguments: list[str], environment: dict[str, str], processes: int, timeout: float
) -> None:
    """Start ``python -m megatron_dppo.train ARGUMENTS`` and kill all its processes as soon as something happened."""
    with _ranks(arguments, environment, processes, "train", None) as (folder, ranks):
        deadline = time.monotonic() + timeout
        while not happened():
            assert all(rank.is_alive() for rank in ranks), _read(folder, "out") + _read(folder, "err")
            assert time.monotonic() < deadline, f"it has not happened in {timeout} s"
            time.sleep(0.002)
        members = [psutil.Process(rank.pid) for rank in ranks]
        family = [child for member in members for child in member.children(recursive=True)]
        for member in [*family, *members]:
            member.kill()
        psutil.wait_procs(family, timeout=10)


@contextmanager
def _ranks(
    arguments: list[str], environment: dict[str, str], processes: int, entry: str, cwd: Path | None
) -> Iterator[tuple[Path, list[BaseProcess]]]:
    """Start the ranks; yields the folder of their output and their processes, which have ended afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = preload()
        environments = [environment | _variables(rank, processes, store.port) for rank in range(processes)]
        common = (folder, entry, cwd or Path.cwd())
        ranks: list[BaseProcess] = [
            context.Process(target=_rank, args=(arguments, each, *common)) for each in environments
        ]
        for rank in ranks:
            rank.start()
        try:
            yield Path(folder), ranks
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def _variables(rank: int, processes: int, port: int) -> dict[str, str]:
    if processes == 1:
        return {}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    # The store is the test's: a free port is bound once and for all, and rank 0 does not bind it again.
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    return {name: str(value) for name, value in (numbers | address).items()}


def _rank(arguments: list[str], environment: dict[str, str], folder: str, entry: str, cwd: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    sys.argv = ["megatron_dppo.train", *arguments]
    for name, stream, number in (("out", sys.stdout, 1), ("err", sys.stderr, 2)):
        file = os.open(Path(folder) / f"{name}.{os.environ.get('RANK', '0')}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        stream.flush()
        os.dup2(file, number)
    from megatron_dppo.commands.main import main, train_main

    os.chdir(cwd)
    try:
        code = main(arguments) if entry == "main" else train_main(arguments)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    # multiprocessing leaves by os._exit, a program of its own does not.
    multiprocessing.util._exit_function()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _join(ranks: list[BaseProcess], deadline: float) -> None:
    """Until all have ended, or one has failed."""
    left = list(ranks)
    while left:
        wait([rank.sentinel for rank in left], timeout=max(0.0, deadline - time.monotonic()))
        for rank in left:
            rank.join(0)
        left = [rank for rank in left if rank.exitcode is None]
        if any(rank.exitcode for rank in ranks):
            return
        if left and time.monotonic() >= deadline:
            raise TimeoutError(f"the run did not end in time; {len(left)} of {len(ranks)} ranks were left")


def _end(ranks: list[BaseProcess]) -> None:
    left = [rank for rank in ranks if rank.is_alive()]
    for rank in left:
        # Not ``os.kill``: the fork server may have reaped the rank and not yet passed its exit code on.
        rank.terminate()
    for rank in left:
        rank.join(GRACE)
        rank.kill()
        rank.join()


def _read(folder: Path, name: str) -> str:
    return "".join(file.read_text(encoding="utf-8", errors="replace") for file in sorted(folder.glob(f"{name}.*")))
