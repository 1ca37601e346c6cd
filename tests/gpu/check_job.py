"""``megatron-dppo doctor`` as a job of two ranks on this machine: clocks, shared files, gloo, NCCL, the weights' group.

NCCL needs a device for each rank.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.gpu.checks import Result, not_run

NUM_RANKS = 2
TIMEOUT_SECONDS = 240.0


def check(device: torch.device) -> Iterator[Result]:
    """Print the report of rank 0; its problems are rows."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        processes = [_start(rank, port, folder, device) for rank in range(NUM_RANKS)]
        try:
            outputs = [process.communicate(timeout=TIMEOUT_SECONDS)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        for rank, output in enumerate(outputs):
            print("\n".join(f"job, rank {rank}: {line}" for line in output.splitlines()))
        codes = [process.returncode for process in processes]
        yield Result(f"exit codes of {NUM_RANKS} ranks {codes}", float(any(codes)), 0.0)
        report = json.loads((folder / "report.json").read_text())
    for finding in report["findings"]:
        yield Result(finding["text"].splitlines()[0], float(finding["is_fatal"]), 0.0)
    for backend in ("gloo", "nccl"):
        lines = [line for line in report["lines"] if line.startswith(f"{backend}: first all-reduce")]
        if not lines:
            yield not_run(f"{backend} between {NUM_RANKS} ranks", f"{NUM_RANKS} devices")
            continue
        speed = float(lines[0].rpartition(" MiB ")[2].split()[0])
        yield Result(f"{backend} between {NUM_RANKS} ranks: seconds a GB of each link", 1 / speed, math.inf)


def _start(rank: int, port: int, folder: Path, device: torch.device) -> subprocess.Popen[str]:
    size = str(NUM_RANKS)
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    hidden = {} if device.type == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_dppo.commands.main", "doctor", "--json", str(folder / "report.json")],
        env=os.environ | ranks | hidden | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
