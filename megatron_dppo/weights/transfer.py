"""Weights from rank 0 to servers in buckets: one is sent while the trainer's ranks gather the next.

Rank 0 holds at most two buckets: the one in flight and the one that is gathered. The calls that announce buckets follow
each other, since an engine must open its receives in the order of the broadcasts.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from megatron_dppo.config.servers import WeightSyncConfig
from megatron_dppo.errors import ConfigError
from megatron_dppo.hf.folder import Weights
from megatron_dppo.weights.attempt import Attempt, catch_server_error
from megatron_dppo.weights.transfer_group import (
    TensorBucket,
    TorchTransport,
    describe_tensors,
    flatten_bucket,
    sort_widest_first,
)
from megatron_dppo_engines.server import InferenceServer, transfer_group_name

Tensors = list[tuple[str, Tensor]]
Description = tuple[list[str], list[str], list[list[int]]]
_LEAVE_SECONDS = 10.0
_OTHER_FAILED = "another server of the broadcast failed"


class Buckets:
    """Tensors in the order of the stream, up to ``limit`` bytes in a bucket; a larger tensor is a bucket by itself.

    The stream is a collective of the trainer's ranks and stays on the caller's thread. After each tensor, the other
    tasks of the event loop run: so a bucket is sent while the next one is gathered.
    """

    def __init__(self, weights: Weights, limit: int) -> None:
        self._weights = weights
        self._limit = limit
        self._first: tuple[str, Tensor] | None = None
        """Tensor that did not fit into the previous bucket."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Tensors:
        bucket = Tensors()
        size = 0
        item = self._first or next(self._weights, None)
        while item is not None and (not bucket or size + item[1].nbytes <= self._limit):
            bucket.append(item)
            size += item[1].nbytes
            await asyncio.sleep(0)
            item = next(self._weights, None)
        self._first = item
        if not bucket:
            raise StopAsyncIteration
        return bucket


class _BucketInFlight(NamedTuple):
    """Tasks of a bucket that is being sent."""

    received: asyncio.Task[None]
    """All servers have responded."""
    sent: asyncio.Task[None]
    """The bytes are sent and their buffer is free."""

    async def cancel(self) -> None:
        """Cancel both tasks and wait for their end."""
        for task in self:
            task.cancel()
        await asyncio.gather(*self, return_exceptions=True)


class BroadcastTransfer:
    """The method ``distributed``. The broadcast group persists from sync to sync."""

    def __init__(
        self,
        servers: Sequence[InferenceServer],
        config: WeightSyncConfig,
        device: torch.device,
        transport: TorchTransport,
    ) -> None:
        self._servers = servers
        self._config = config
        self._device = device
        self._transport = transport
        self._group: Any = None
        self.members: tuple[str, ...] = ()

    async def send(self, weights: Weights, attempt: Attempt, last_versions: Mapping[str, int]) -> None:
        """Send the weights to the paused servers, from ``begin_update`` to ``end_update``."""
        await self._join(attempt.remaining(self._servers), attempt, last_versions)
        await attempt.call_each(attempt.remaining(self._servers), lambda server: server.begin_update())
        if set(self.members) != {s.url for s in attempt.remaining(self._servers)}:
            # A broadcast waits for every member of the group, so it cannot start when one of them has failed.
            return attempt.fail_all(attempt.remaining(self._servers), _OTHER_FAILED)
        previous: _BucketInFlight | None = None
        try:
            async for tensors in Buckets(weights, self._config.bucket_megabytes * 2**20):
                if previous is not None:
                    await previous.received
                servers = attempt.remaining(self._servers)
                if not servers:
                    break
                previous = await self._start(tensors, servers, attempt, previous)
                del tensors  # a broadcast needs its flattened buffer only
            if previous is not None:
                await asyncio.gather(*previous)
        finally:
            if previous is not None:
                await previous.cancel()
        await attempt.call_each(attempt.remaining(self._servers), lambda server: server.end_update(attempt.version))

    async def _start(
        self,
        tensors: Tensors,
        servers: Sequence[InferenceServer],
        attempt: Attempt,
        previous: _BucketInFlight | None,
    ) -> _BucketInFlight:
        """Start to send a bucket; returns when the previous one is sent."""
        tensors = sort_widest_first(tensors)
        received = asyncio.create_task(self._announce(describe_tensors(tensors), servers, attempt))
        if previous is not None:
            await previous.sent
        # Flatten only now: with the buffer of the previous bucket, this copy would be a third bucket in memory.
        sent = asyncio.create_task(self._broadcast(flatten_bucket(tensors), servers, attempt))
        return _BucketInFlight(received, sent)

    async def _announce(self, bucket: Description, servers: Sequence[InferenceServer], attempt: Attempt) -> None:
        """Have all members receive a bucket."""
        # After a failure the other members may wait for data that it should forward. Closing this end wakes them.
        await attempt.call_each(servers, lambda server: server.receive_broadcast(*bucket), on_failure=self._close_group)
        if attempt.failed.keys() & {server.url for server in servers}:
            # The others must form a new group without it and receive all tensors from the first one on.
            attempt.fail_all(servers, _OTHER_FAILED)

    async def _broadcast(self, bucket: TensorBucket, servers: Sequence[InferenceServer], attempt: Attempt) -> None:
        if self._group is None:
            return  # closed in the meantime, because a server has failed
        try:
            await self._transport.broadcast(bucket, self._group)
        except RuntimeError as error:
            attempt.fail_all(servers, f"the broadcast broke off: {error}")
            self._close_group()

    async def _join(
        self, servers: Sequence[InferenceServer], attempt: Attempt, last_versions: Mapping[str, int]
    ) -> None:
        """Form a group of rank 0 and the servers, or keep the current one if it has the same members.

        A server that does not report the version that its URL got last is a new process, which is not in the group.
        """
        is_unchanged = all(attempt.infos[s.url].policy_version == last_versions.get(s.url) for s in servers)
        # In order too, since the place of a server decides the ranks of its processes in the group.
        has_same_members = self.members == tuple(server.url for server in servers)
        if self._group is not None and has_same_members and is_unchanged:
            return
        await self.leave_group()
        if not servers:
            return
        host = self._config.host
        try:
            listener, port = self._transport.listen(host)
        except OSError as error:
            raise ConfigError(
                f"rollout.weight_sync.host = {host!r} is not an address of this machine, where rank 0 runs ({error}); "
                "set it to the address that the servers reach"
            ) from error
        sizes = [attempt.infos[server.url].world_size for server in servers]
        # Rank 0 is the trainer; the ranks of the servers follow, server by server.
        offsets = {server.url: 1 + sum(sizes[:i]) for i, server in enumerate(servers)}
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        world_size = 1 + sum(sizes)
        # All sides join at once: each call returns only when the group is complete.
        opened = asyncio.create_task(
            self._transport.open(
                listener,
                name=transfer_group_name(host, port),
                world_size=world_size,
                backend=backend,
                timeout=self._config.timeout_seconds,
            )
        )
        await attempt.call_each(
            servers, lambda server: server.join_group(host, port, offsets[server.url], world_size, backend)
        )
        try:
            self._group = await opened
        except (RuntimeError, ValueError) as error:
            attempt.fail_all(servers, f"the group for the weights at {host}:{port} was not complete: {error}")
            return
        self.members = tuple(server.url for server in servers)

    async def leave_group(self) -> None:
        """Leave the group, if there is one."""
        members = self.members
        self.members = ()
        self._close_group()
        await asyncio.gather(*(_leave(server) for server in self._servers if server.url in members))

    def _close_group(self) -> None:
        if self._group is not None:
            self._transport.close(self._group)
            self._group = None


async def _leave(server: InferenceServer) -> None:
    """Have a server leave the group; one that does not respond leaves when it joins the next group."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LEAVE_SECONDS):
            await catch_server_error(server.leave_group())
