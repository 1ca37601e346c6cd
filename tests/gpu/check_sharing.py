"""Weights that a server reads in this process's memory: by the code of the method ``ipc``, in a process of its own."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import torch

from megatron_dppo.weights.transfer_group import flatten_bucket
from megatron_dppo_engines.shared_memory import SharedBucket, as_flattened_bucket, as_json
from tests.gpu.checks import Result

SECONDS = 200
KEPT = 2.0**20
"""Bytes: a bucket has 16 MiB."""


def check(device: torch.device) -> Iterator[Result]:
    """One device is enough: servers and trainer share theirs."""
    before = allocated(device)
    for engine in ("sglang", "vllm"):
        yield Result(f"numbers that a server reads wrong, as {engine} does", handed_over(device, engine), 0.0)
    kept = allocated(device) - before
    yield Result("bytes that are kept when the readers have gone", kept, KEPT)
    SharedBucket(numbers(device)[1], readers=1).free(taken=False)
    yield Result("bytes that are kept for a reader that never came", allocated(device) - before - kept, KEPT)


def allocated(device: torch.device) -> float:
    """Bytes in use on a GPU, else of shared memory that this process has made."""
    if device.type == "cuda":
        torch.cuda.ipc_collect()
        return float(torch.cuda.memory_allocated())
    own = [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")]
    return float(sum(os.stat(name).st_size for name in own))


def numbers(device: torch.device) -> tuple[list[tuple[str, torch.Tensor]], torch.Tensor]:
    """Tensors of two types, and the bucket of them."""
    half = torch.arange(1 << 22, device=device).to(torch.bfloat16).view(2048, 2048)
    tensors = [("half", half), ("full", torch.arange(1 << 21, device=device).float())]
    return tensors, flatten_bucket(tensors).data


def handed_over(device: torch.device, engine: str) -> float:
    """Numbers that are not right in the other process; it is asked right after the kernels were begun."""
    tensors, data = numbers(device)
    names, dtypes, shapes = ["full", "half"], ["float32", "bfloat16"], [[1 << 21], [2048, 2048]]
    shared = SharedBucket(data, readers=1)
    del data
    pickled = as_flattened_bucket(shared.handle, names, dtypes, shapes)
    given = {
        "engine": engine,
        "pickled": base64.b64encode(pickled).decode(),
        "fields": as_json(shared.handle),
        "cuda": device.type == "cuda",
    }
    command = [sys.executable, "-m", "tests.gpu.sharing_reader"]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, timeout=SECONDS)
    shared.free(taken=done.returncode == 0)
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    del tensors
    return float(done.stdout.splitlines()[-1])
