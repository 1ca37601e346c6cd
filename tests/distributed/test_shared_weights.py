"""Weights by reference from several ranks: each server reads the memory of its own rank, and whatever fails, on rank 0,
another rank or a server, no rank waits for a meeting that never comes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.errors import ConfigError
from megatron_dppo.parallel.objects import all_gather_objects
from megatron_dppo.weights import ipc
from megatron_dppo.weights.attempt import SyncResult
from megatron_dppo.weights.ipc import MemorySharing
from megatron_dppo_engines.shared_memory import SharedBucket
from tests.distributed.spawn import run_distributed
from tests.unit.weight_server import FakeServer, files_of, make, weights

pytestmark = pytest.mark.distributed

URLS = ("http://a:1", "http://b:2", "http://c:3")
OWNERS = {URLS[0]: [0], URLS[1]: [2], URLS[2]: [1]}


def stream(rank: int) -> Iterator[tuple[str, Tensor]]:
    """Each rank's is another, so that a server shows whose it read; a collective, as the real one is."""
    for name, tensor in weights(0).items():
        dist.barrier()
        yield name, tensor + rank


class Attempts:
    """One sync after another, on all ranks; ``taken``: what this rank knew of its reader at the end of each bucket."""

    def __init__(self, folder: Path) -> None:
        self.rank, self.folder = dist.get_rank(), folder
        self.processes = all_gather_objects(os.getpid(), dist.group.WORLD)
        self.sharing = MemorySharing(OWNERS, 2 * 2**20, torch.float32, tied=False, group=dist.group.WORLD)

        self.taken: list[bool] = []

    def send(self, **fails: dict[str, int]) -> tuple[SyncResult | None, list[FakeServer]]:
        """On rank 0 what became of it; afterwards no rank has shared memory."""
        self.taken.clear()
        servers, result = [FakeServer(url.removeprefix("http://")) for url in URLS], None
        for server in servers:
            server.fails = dict(fails.get(server.url[7], {}))
        if self.rank == 0:
            sync = make(servers, self.folder, sharing=self.sharing, checksum_every=0)
            try:
                result = sync.send(stream(0), 1)
            finally:
                dist.barrier()  # a collective, so that ranks which are elsewhere are found
                assert not files_of(*self.processes)
        else:
            self.sharing.open(stream(self.rank)).run()
            dist.barrier()
        return result, servers


def holds(server: FakeServer, rank: int) -> bool:
    return server.holds({name: tensor + rank for name, tensor in weights(0).items()})


def each_case(rank: int, world: int, folder: str) -> None:
    attempts = Attempts(Path(folder))
    free = SharedBucket.free

    def noted(bucket: SharedBucket, *, taken: bool) -> None:
        attempts.taken.append(taken)
        free(bucket, taken=taken)

    with mock.patch.object(SharedBucket, "free", noted):
        servers_that_fail(attempts)
        a_rank_that_cannot_share(attempts)
        an_error_of_another_kind(attempts)


def servers_that_fail(attempts: Attempts) -> None:
    result, servers = attempts.send()
    assert attempts.taken == 5 * [True]
    if result is not None:
        assert list(result.good) == list(URLS)
        assert all(holds(server, OWNERS[server.url][0]) for server in servers), "not of its own rank"
    for call in ("pause", "receive_handles", "end_update"):
        result, servers = attempts.send(b={call: 1})
        if result is not None:
            assert list(result.good) == [URLS[0], URLS[2]] and f"{call} refused" in result.failed[URLS[1]]
            assert holds(servers[0], 0) and holds(servers[2], 1)
        # Nobody else says of the memory that a failed server had, or would have had, that it is free.
        assert attempts.taken == 5 * [attempts.rank != 2 or call == "end_update"]
    result, _ = attempts.send(**{name: {"receive_handles": 1} for name in "abc"})
    assert result is None or not result.good
    assert attempts.taken == 5 * [False]


def a_rank_that_cannot_share(attempts: Attempts) -> None:
    """As on a GPU whose driver refuses."""
    error = RuntimeError("CUDA error: invalid device context")
    broken = mock.patch.object(ipc, "SharedBucket", side_effect=error)
    with broken if attempts.rank == 2 else nullcontext():
        result, _ = attempts.send()
    if result is not None:
        assert list(result.good) == [URLS[0], URLS[2]]
        assert "cannot share the memory of rank 2: CUDA error: invalid device" in result.failed[URLS[1]]


def an_error_of_another_kind(attempts: Attempts) -> None:
    """One that ends the run: before the first tensor, with a bucket half gathered, or while one is read."""
    for call in ("pause", "receive_handles", "end_update"):

        async def fail(self: FakeServer, *_: Any) -> None:
            raise ConfigError("stop")

        with mock.patch.object(FakeServer, call, fail):
            if attempts.rank:
                attempts.send()
            else:
                with pytest.raises(ConfigError, match="stop"):
                    attempts.send()
    pulled = 0

    async def stopped(_: float) -> None:
        nonlocal pulled
        pulled += 1
        if pulled == 2:
            raise ConfigError("stop")

    with mock.patch.object(ipc.asyncio, "sleep", stopped):
        if attempts.rank:
            attempts.send()
        else:
            with pytest.raises(ConfigError, match="stop"):
                attempts.send()


def test_no_rank_waits_whatever_fails_and_each_server_reads_its_own_ranks_memory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    run_distributed(each_case, 3, str(tmp_path), timeout=120.0)
