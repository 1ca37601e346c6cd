"""The group for the weights is never split from a default group that is bound to a device, as a CUDA trainer's is."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from megatron_dppo_engines.serving import VLLM_EXTENSION

pytestmark = pytest.mark.slow

EXTENSION = VLLM_EXTENSION / "megatron_dppo_vllm.py"

PROGRAM = """
import contextlib, socket, sys, threading
from collections.abc import Iterator
import torch
import torch.distributed as dist
from torch.distributed import TCPStore, distributed_c10d as c10d

class Parent:
    "stands for the default group's NCCL backend"
    supports_splitting = True

class Default:
    "stands for a default group that is bound to a device"
    bound_device_id = torch.device("cuda", 0)
    def _get_backend(self, device): return Parent()
    def rank(self): return 0

class Options:
    is_high_priority_stream = False
    _timeout = split_from = split_color = global_ranks_in_group = group_name = None

class NCCL:
    "records what torch would split the new communicator from"
    def __init__(self, store, rank, size, options):
        print("split from", type(options.split_from).__name__)
        raise InterruptedError
NCCL.Options = Options

default = Default()
if DEFAULT_GROUP:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    c10d._get_default_group = lambda: default
c10d.ProcessGroupNCCL, c10d.is_nccl_available = NCCL, lambda: True
from megatron_dppo.weights import transfer_group
from megatron_dppo_engines.serving import VLLM_EXTENSION
transfer_group._get_default_group = _get_default_group = c10d._get_default_group
contextmanager = contextlib.contextmanager
GUARD
listening = socket.create_server(("127.0.0.1", 0))
port = listening.getsockname()[1]
threading.Thread(target=TCPStore, args=("127.0.0.1", port, 2, False), daemon=True).start()
try:
    transfer_group.open_transfer_group(
        "127.0.0.1", port, name="weights", rank=0, world_size=2, backend="nccl", timeout=60, listening=listening
    )
except InterruptedError:
    print("bound to", default.bound_device_id)
"""


def run(guard: str = "", *, default_group: bool = True) -> list[str]:
    program = PROGRAM.replace("GUARD", guard).replace("DEFAULT_GROUP", str(default_group))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_group_is_split_from_nothing_and_the_default_group_is_bound_as_before() -> None:
    assert run() == ["split from NoneType", "bound to cuda:0"]
    # The stand-in shows it where nobody guards.
    assert run("transfer_group.unbound_default_group = contextlib.nullcontext") == [
        "split from Parent",
        "bound to cuda:0",
    ]


def test_the_guard_inside_vllm_does_the_same_also_where_there_is_no_default_group() -> None:
    tree = ast.parse(EXTENSION.read_text())
    (guard,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "unbound_default_group"]
    theirs = ast.unparse(guard) + "\ntransfer_group.unbound_default_group = unbound_default_group"
    assert run(theirs) == ["split from NoneType", "bound to cuda:0"]
    assert run(theirs, default_group=False) == run(default_group=False) == ["split from NoneType", "bound to cuda:0"]
    guarded = {
        call
        for block in ast.walk(tree)
        if isinstance(block, ast.With) and ast.unparse(block.items[0]) == "unbound_default_group()"
        for call in ast.walk(block)
        if isinstance(call, ast.Call)
    }
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and "_new_process_group" in ast.unparse(n.func)]
    assert calls and set(calls) <= guarded
