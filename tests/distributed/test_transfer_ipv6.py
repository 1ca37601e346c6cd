"""The group for weights over IPv6."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_dppo.weights.transfer_group import TorchTransport, open_transfer_group
from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.distributed


def check(rank: int, world_size: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    file, port = Path(folder) / "port", 0
    listener = None
    if rank == 0:
        listener, port = TorchTransport().listen("::1")
        file.write_text(str(port))
    dist.barrier()
    group = open_transfer_group(
        *("::1", port or int(file.read_text())),
        **{"name": "weights", "rank": rank, "world_size": world_size, "backend": "gloo", "timeout": 30},
        listening=listener,
    )
    data = torch.arange(4.0) if rank == 0 else torch.zeros(4)
    dist.broadcast(data, group=group, group_src=0)
    assert data.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_the_group_for_weights_opens_at_an_ipv6_address(tmp_path: Path) -> None:
    run_distributed(check, 2, str(tmp_path), timeout=60)
