"""Layouts over several devices with NCCL, each against transformers in fp32 on the CPU; and weights handed to another
process, beside a default group that is bound to a device (it must not be split for that)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.distributed.layouts import LAYOUTS, describe
from tests.distributed.parity import Case
from tests.gpu.check_model import BF16, FP32
from tests.gpu.checks import Result, not_run

SECONDS = 400
REHEARSED = 2
"""layouts of two processes that the CPU goes through"""


def check(device: torch.device) -> Iterator[Result]:
    """Check what the number of devices allows; two processes on the CPU."""
    cuda = device.type == "cuda"
    devices = torch.cuda.device_count() if cuda else 2
    for world in (2, 4, 8):
        cases = LAYOUTS[world] if cuda else LAYOUTS[world][:REHEARSED]
        if devices < world:
            yield from (not_run(f"{world} processes, {describe(case)}", f"{world} devices") for case in cases)
            continue
        dtypes = [dtype_of(case, cuda) for case in cases]
        for case, dtype, errors in zip(cases, dtypes, parity(world, cases, dtypes, cuda), strict=True):
            bounds = {"fp32": FP32, "bf16": BF16}[dtype]
            worst = max(bounds, key=lambda name: errors[name] / max(bounds[name], 1e-12))
            yield Result(f"{world} processes, {dtype}, {describe(case)}: {worst}", errors[worst], bounds[worst])
    if devices < 2:
        yield not_run("weights to another process by NCCL", "2 devices")
    else:
        yield Result("weights to another process, numbers that are wrong", transfer(cuda), 0.0)


def dtype_of(case: Case, cuda: bool) -> str:
    """fp32, unless Transformer Engine has no attention for it."""
    from megatron_dppo.mcore.transformer_engine import has_transformer_engine

    return "bf16" if cuda and case.parallel.get("context_parallel_size") and has_transformer_engine() else "fp32"


def parity(world: int, cases: list[Case], dtypes: list[str], cuda: bool) -> list[dict[str, float]]:
    """The worst errors of any rank, for each case."""
    each = [{"case": asdict(case), "dtype": dtype} for case, dtype in zip(cases, dtypes, strict=True)]
    given = json.dumps({"cases": each, "cuda": cuda})
    return json.loads(run_ranks(world, "tests.gpu.devices_rank", given))


def transfer(cuda: bool) -> float:
    """Numbers that the second process got wrong."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return float(run_ranks(2, "tests.gpu.devices_rank", json.dumps({"port": port, "cuda": cuda})))


def run_ranks(world: int, module: str, argument: str) -> str:
    """The last line of rank 0.

    Raises:
        RuntimeError: a process failed, or did not end in time; with the end of what it printed.
    """
    with tempfile.TemporaryDirectory() as place:
        processes, logs = [], [Path(place) / f"rank_{rank}.log" for rank in range(world)]
        for rank, log in enumerate(logs):
            own: dict[str, Any] = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
            with log.open("wb") as out:
                command = [sys.executable, "-m", module, f"{place}/store", argument]
                env = os.environ | {name: str(value) for name, value in own.items()}
                processes.append(subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT))
        try:
            for rank, process in enumerate(processes):
                if process.wait(timeout=SECONDS):
                    raise RuntimeError(f"rank {rank}: exit code {process.returncode}: {logs[rank].read_text()[-1500:]}")
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        return logs[0].read_text().splitlines()[-1]
