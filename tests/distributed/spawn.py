"""Run one function in several real processes joined by gloo.

They are forked from a server that has imported torch, Megatron and this package once: importing takes each process four
seconds, and there are hundreds of them.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.warm import preload


def _child(
    rank: int,
    world_size: int,
    environment: dict[str, str],
    folder: str,
    timeout: float,
    fn: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(
        environment,
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout))
    try:
        fn(rank, world_size, *args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_distributed(fn: Callable[..., None], world_size: int, *args: Any, timeout: float = 240.0) -> None:
    """Call ``fn(rank, world_size, *args)`` in ``world_size`` processes with one thread each.

    ``fn`` must be a module-level function. The rendezvous is a file, so there is no port to race for.

    Args:
        fn: the function; the default process group is ready when it is called.
        world_size: number of processes.
        args: further picklable arguments.
        timeout: seconds until the processes are ended.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a child failed; the message is its traceback.
        TimeoutError: the children were still running after ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    preload()
    with tempfile.TemporaryDirectory() as folder:
        arguments = world_size, dict(os.environ), folder, timeout, fn, args
        context = mp.start_processes(_child, arguments, nprocs=world_size, join=False, start_method="forkserver")
        try:
            while not context.join(timeout=max(0.0, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{fn.__name__} on {world_size} processes ran past {timeout} s")
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                    process.join()
