"""Weights from rank 0 to servers in buckets: one is sent while the trainer's ranks gather the next.

Rank 0 holds at most two: the one that is sent, and the one that is gathered. The calls that announce them go one after
another, since an engine must open its receives in the order in which they are sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_dppo.config.servers import WeightSyncConfig
from megatron_dppo.errors import ConfigError
from megatron_dppo.rollout.server import InferenceServer, transfer_group_name
from megatron_dppo.weights.attempt import Attempt, caught
from megatron_dppo.weights.transfer_group import GroupTransport, TensorBucket, described, flatten_bucket, widest_first

Weights = Iterator[tuple[str, Tensor]]
Tensors = list[tuple[str, Tensor]]
Description = tuple[list[str], list[str], list[list[int]]]
"""names, dtypes and shapes of a bucket's tensors"""
_GOODBYE_SECONDS = 10.0
_ANOTHER = "another server of the broadcast failed"


class Buckets:
    """Tensors in the order of the stream, up to ``limit`` bytes together; a larger one goes alone.

    The stream is a collective of the trainer's ranks and stays on the caller's thread. After each of its tensors
    everything else on the event loop gets a turn: that is how a bucket is sent while the next one is gathered.
    """

    def __init__(self, weights: Weights, limit: int) -> None:
        self._weights, self._limit = weights, limit
        self._first: tuple[str, Tensor] | None = None
        """what did not fit into the bucket before"""

    def __aiter__(self) -> Buckets:
        return self

    async def __anext__(self) -> Tensors:
        bucket, size = Tensors(), 0
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


class _Flight(NamedTuple):
    """A bucket that is under way."""

    answered: asyncio.Task[None]
    """by all servers"""
    sent: asyncio.Task[None]
    """the bytes have left, and their buffer is free"""

    async def stop(self) -> None:
        """Neither goes on."""
        for task in self:
            task.cancel()
        await asyncio.gather(*self, return_exceptions=True)


class BucketTransfer:
    """The methods ``distributed`` and ``tensor``; the group of the first is kept from sync to sync.

    Args:
        servers: of the run.
        config: method and sizes.
        device: of the buckets; a CUDA device makes the group an NCCL one.
        transport: how a bucket reaches the members of a group.
    """

    def __init__(
        self,
        servers: Sequence[InferenceServer],
        config: WeightSyncConfig,
        device: torch.device,
        transport: GroupTransport,
    ) -> None:
        self._servers, self._config, self._device, self._transport = servers, config, device, transport
        self._group: Any = None
        self.members: tuple[str, ...] = ()
        """URLs of the servers in the group"""

    async def send(self, weights: Weights, attempt: Attempt, given: Mapping[str, int]) -> None:
        """Everything between the pause of the servers and the proof.

        Args:
            weights: what is sent, in the type that it is sent in.
            attempt: who of the servers is left, and notes who fails.
            given: by URL: the version that a server was given last.
        """
        if self._config.method == "distributed":
            await self._join(attempt.left(self._servers), attempt, given)
        await attempt.each(attempt.left(self._servers), lambda server: server.begin_update())
        if self._config.method == "distributed" and set(self.members) != {s.url for s in attempt.left(self._servers)}:
            # Nothing passes through a group of which a member does not take part: it would be waited for.
            return attempt.fail_all(attempt.left(self._servers), _ANOTHER)
        before: _Flight | None = None
        try:
            async for tensors in Buckets(weights, self._config.bucket_megabytes * 2**20):
                if before is not None:
                    await before.answered
                left = attempt.left(self._servers)
                if not left:
                    break
                before = await self._start(tensors, left, attempt, before)
                del tensors  # of a broadcast only the buffer is kept
            if before is not None:
                await asyncio.gather(*before)
        finally:
            if before is not None:
                await before.stop()
        await attempt.each(attempt.left(self._servers), lambda server: server.end_update(attempt.version))

    async def _start(
        self, tensors: Tensors, servers: Sequence[InferenceServer], attempt: Attempt, before: _Flight | None
    ) -> _Flight:
        """Send a bucket on its way; returns when the one before has left."""
        if self._config.method == "tensor":
            calls = asyncio.create_task(attempt.each(servers, lambda server: server.receive_tensors(tensors)))
            return _Flight(calls, calls)
        tensors = widest_first(tensors)
        answered = asyncio.create_task(self._announce(described(tensors), servers, attempt))
        if before is not None:
            await before.sent
        # Not earlier: with the buffer of the one before this copy would be a third bucket.
        sent = asyncio.create_task(self._broadcast(flatten_bucket(tensors), servers, attempt))
        return _Flight(answered, sent)

    async def _announce(self, bucket: Description, servers: Sequence[InferenceServer], attempt: Attempt) -> None:
        """Have all members receive a bucket."""
        # A server may wait for what another one should pass on. Closing our end tells it that nothing will come.
        await attempt.each(servers, lambda server: server.receive_broadcast(*bucket), on_failure=self._close)
        if attempt.failed.keys() & {server.url for server in servers}:
            # One member less: whoever is left has to meet in a new group, from the first tensor on.
            attempt.fail_all(servers, _ANOTHER)

    async def _broadcast(self, bucket: TensorBucket, servers: Sequence[InferenceServer], attempt: Attempt) -> None:
        if self._group is None:
            return  # closed meanwhile: a server has failed
        try:
            await self._transport.broadcast(bucket, self._group)
        except RuntimeError as error:
            attempt.fail_all(servers, f"the broadcast broke off: {error}")
            self._close()

    async def _join(self, servers: Sequence[InferenceServer], attempt: Attempt, given: Mapping[str, int]) -> None:
        """A group of rank 0 and the servers that are there; kept until one of them is another process, which knows of
        no group and has not the version that its URL was given."""
        same = all(attempt.infos[s.url].policy_version == given.get(s.url) for s in servers)
        if self._group is not None and self.members == tuple(server.url for server in servers) and same:
            return
        await self.leave()
        if not servers:
            return
        host = self._config.host
        try:
            listener, port = self._transport.listen(host)
        except OSError as error:
            raise ConfigError(
                f"rollout.weight_sync.host = {host!r} is no address of this machine, where rank 0 runs ({error}); set "
                "it to the one that the servers reach"
            ) from error
        sizes = [attempt.infos[server.url].world_size for server in servers]
        offsets = {server.url: 1 + sum(sizes[:i]) for i, server in enumerate(servers)}
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        size = 1 + sum(sizes)
        ours = asyncio.create_task(
            self._transport.open(
                listener,
                name=transfer_group_name(host, port),
                world_size=size,
                backend=backend,
                timeout=self._config.timeout_seconds,
            )
        )
        await attempt.each(servers, lambda server: server.join_group(host, port, offsets[server.url], size, backend))
        try:
            self._group = await ours
        except (RuntimeError, ValueError) as error:
            attempt.fail_all(servers, f"the group for the weights at {host}:{port} was not complete: {error}")
            return
        self.members = tuple(server.url for server in servers)

    async def leave(self) -> None:
        """The group, if there is one."""
        members, self.members = self.members, ()
        self._close()
        await asyncio.gather(*(_goodbye(s) for s in self._servers if s.url in members))

    def _close(self) -> None:
        if self._group is not None:
            self._transport.close(self._group)
            self._group = None


async def _goodbye(server: InferenceServer) -> None:
    """Let it leave the group; one that does not answer leaves when it joins the next."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_GOODBYE_SECONDS):
            await caught(server.leave_group())
