"""Weights to servers on the same GPUs (or CPU) by reference: the method ``ipc``.

Every rank of the trainer sees the whole stream of weights (``mcore/bridge.py``). Each lays it into buckets, the same on
all of them, and those on whose GPU a server computes hand over theirs: CUDA IPC opens memory of one's own GPU. Rank 0
collects the handles and tells the servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dppo.hf.folder import stored_dtype
from megatron_dppo.parallel.objects import from_each, from_leader
from megatron_dppo.rollout.handles import Handle, SharedBucket
from megatron_dppo.rollout.server import InferenceServer
from megatron_dppo.weights.attempt import Attempt
from megatron_dppo.weights.transfer import Tensors, Weights
from megatron_dppo.weights.transfer_group import described, flatten_bucket, widest_first


@dataclass(frozen=True)
class Sharing:
    """Who reads whose memory, known alike to all ranks of the trainer."""

    owners: Mapping[str, Sequence[int]]
    """by URL of a server: for each of its ranks the trainer's rank on the same device"""
    bucket_bytes: int
    dtype: torch.dtype
    """that the weights are sent in"""
    tied: bool
    """the output layer is the embedding, and sent under both names"""
    group: ProcessGroup | None
    """all ranks over the CPU; None = this one is alone"""

    def open(self, weights: Weights) -> SharedStream:
        """One attempt's stream; a collective from its first tensor to ``SharedStream.end``.

        Args:
            weights: full tensors by Hugging Face name, on all ranks.
        """
        rank = 0 if self.group is None else dist.get_rank(self.group)
        readers = [owner for owners in self.owners.values() for owner in owners].count(rank)
        return SharedStream(as_sent(weights, self.dtype, tied=self.tied), self.bucket_bytes, readers, self.group)


def as_sent(weights: Weights, dtype: torch.dtype, *, tied: bool) -> Weights:
    """Copies in the type that is sent; of a tied model the output layer too, under its own name."""
    for name, tensor in weights:
        sent = tensor.detach().to(stored_dtype(name, dtype), copy=True)
        yield name, sent
        if tied and name == "model.embed_tokens.weight":
            yield "lm_head.weight", sent


class SharedStream(Iterator[tuple[str, Tensor]]):
    """A stream of weights whose buckets end at the same tensors on all ranks, which meet there.

    The others wait for each meeting. So whoever asks for the next tensor without having shared a bucket meets with
    nothing to share, as a rank does that only runs the stream to its end. ``end`` is the last meeting.

    Args:
        weights: what is sent, the same on all ranks.
        limit: bytes of a bucket; a larger tensor goes alone.
        readers: server ranks that read this rank's buckets; 0 = it shares none.
        group: all ranks.
    """

    def __init__(self, weights: Weights, limit: int, readers: int, group: ProcessGroup | None) -> None:
        self._weights, self._limit, self._readers, self._group = weights, limit, readers, group
        self._size = 0
        self._next: tuple[str, Tensor] | None = None
        self._begun = False
        self._shared: SharedBucket | None = None
        self.complete = False
        """the tensor before was the last one of its bucket"""
        self.taken: frozenset[int] = frozenset()
        """on rank 0: the ranks whose bucket the servers have read and given back, until the next meeting"""

    def __next__(self) -> tuple[str, Tensor]:
        if not self._begun:
            self._begun, self._next = True, next(self._weights, None)
        if self.complete:
            self.share([])
        if self._next is None:
            raise StopIteration
        item, self._next = self._next, next(self._weights, None)
        self._size += item[1].nbytes
        self.complete = self._next is None or self._size + self._next[1].nbytes > self._limit
        return item

    def share(self, tensors: Tensors) -> list[Handle | str | None]:
        """Meet at the end of a bucket; by rank: its handle, why it has none, or None where nobody reads it.

        The bucket before is free from here on, so rank 0 comes when it has been read.

        Args:
            tensors: the bucket's, the widest types first; none to share nothing.
        """
        self.complete, self._size = False, 0
        self._free()
        mine: Handle | str | None = None
        if tensors and self._readers:
            try:
                self._shared = SharedBucket(flatten_bucket(tensors).data, self._readers)
                mine = self._shared.handle
            except (RuntimeError, OSError) as error:
                mine = str(error)
        return from_each(mine, self._group)

    def run(self) -> None:
        """On ranks other than 0: share every bucket."""
        bucket = Tensors()
        for item in self:
            bucket.append(item)
            if self.complete:
                # Nothing else may keep the tensors while their copy is made.
                del item
                self.share(bucket)
                bucket = Tensors()
        self.end()

    def end(self) -> None:
        """Run what is left, and free the last bucket; once."""
        for _ in self:
            pass
        self._free()

    def _free(self) -> None:
        taken, self.taken = from_leader(lambda: self.taken, self._group), frozenset()
        rank = 0 if self._group is None else dist.get_rank(self._group)
        if self._shared is not None:
            self._shared.free(taken=rank in taken)
            self._shared = None


class HandleTransfer:
    """Rank 0's part: one bucket is read by the servers while the next is gathered.

    Args:
        servers: of the run.
        sharing: whose memory each of them reads.
    """

    def __init__(self, servers: Sequence[InferenceServer], sharing: Sharing) -> None:
        self._servers, self._owners = list(servers), sharing.owners

    async def send(self, weights: Weights, stream: SharedStream, attempt: Attempt) -> None:
        """Everything between the pause of the servers and the proof.

        Args:
            weights: the stream, as it passes through whoever else looks at it.
            stream: itself.
            attempt: who of the servers is left, and notes who fails.
        """
        for server in attempt.left(self._servers):
            ranks, planned = attempt.infos[server.url].world_size, len(self._owners[server.url])
            if ranks != planned:
                text = f"has {ranks} ranks, but {planned} by its section, [rollout.sglang] or [rollout.vllm]"
                attempt.fail_all([server], f"{text}; set the tensor-parallel size there: GPUs are told by it")
        await attempt.each(attempt.left(self._servers), lambda server: server.begin_update())
        reading: asyncio.Task[None] | None = None
        try:
            async for tensors in _buckets(weights, stream):
                if reading is not None:
                    await reading
                reading = self._start(widest_first(tensors), stream, attempt)
                tensors.clear()  # the shared copy is enough
            if reading is not None:
                await reading
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
        await attempt.each(attempt.left(self._servers), lambda server: server.end_update(attempt.version))

    def _start(self, tensors: Tensors, stream: SharedStream, attempt: Attempt) -> asyncio.Task[None]:
        bucket, handles = described(tensors), stream.share(tensors)
        given: dict[str, list[Handle]] = {}
        for server in attempt.left(self._servers):
            owned = [(rank, handles[rank]) for rank in self._owners[server.url]]
            given[server.url] = [handle for _, handle in owned if isinstance(handle, tuple)]
            if problems := sorted({f"rank {rank}: {why}" for rank, why in owned if not isinstance(why, tuple)}):
                attempt.fail_all([server], f"the trainer cannot share the memory of {'; '.join(problems)}")

        async def read() -> None:
            servers = attempt.left(self._servers)
            await attempt.each(servers, lambda server: server.receive_handles(*bucket, given[server.url]))
            left = attempt.left(servers)
            stream.taken = frozenset(rank for server in left for rank in self._owners[server.url])

        return asyncio.create_task(read())


async def _buckets(weights: Weights, stream: SharedStream) -> AsyncIterator[Tensors]:
    """Each bucket of the stream; after each tensor everything else on the event loop gets a turn."""
    bucket = Tensors()
    for item in weights:
        bucket.append(item)
        await asyncio.sleep(0)
        if stream.complete:
            yield bucket
            bucket = Tensors()
