"""Weights to servers on the same GPUs (or CPU) by reference: the method ``ipc``.

Every rank of the trainer sees the whole stream of weights (``mcore/bridge.py``) and packs it into the same buckets. The
ranks on whose GPU a server computes share theirs: CUDA IPC opens memory of the same GPU only. Rank 0 collects the
handles and passes them to the servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dppo.hf.folder import Weights, stored_dtype
from megatron_dppo.parallel.objects import all_gather_objects, broadcast_object
from megatron_dppo.weights.attempt import Attempt
from megatron_dppo.weights.transfer import Tensors
from megatron_dppo.weights.transfer_group import describe_tensors, flatten_bucket, sort_widest_first
from megatron_dppo_engines.server import InferenceServer
from megatron_dppo_engines.shared_memory import Handle, SharedBucket


@dataclass(frozen=True)
class MemorySharing:
    """Assignment of trainer ranks to the servers that read their memory, the same on all ranks."""

    owners: Mapping[str, Sequence[int]]
    """For each rank of a server, the trainer's rank on the same device; by URL."""
    bucket_bytes: int
    dtype: torch.dtype
    tied: bool
    """The output layer is the embedding and is sent under both names."""
    group: ProcessGroup | None
    """CPU group of all ranks. None: a single rank."""

    def open(self, weights: Weights) -> SharedStream:
        """Return the stream of one attempt, a collective from its first tensor to ``SharedStream.end``."""
        rank = 0 if self.group is None else dist.get_rank(self.group)
        readers = [owner for owners in self.owners.values() for owner in owners].count(rank)
        stream = cast_for_sending(weights, self.dtype, tied=self.tied)
        return SharedStream(stream, self.bucket_bytes, readers, self.group)


def cast_for_sending(weights: Weights, dtype: torch.dtype, *, tied: bool) -> Weights:
    """Stream copies in the dtype that is sent; a tied model's embedding also under the name of the output layer."""
    for name, tensor in weights:
        # A copy in any case: digests may read it after the stream has moved on.
        sent = tensor.detach().to(stored_dtype(name, dtype), copy=True)
        yield name, sent
        if tied and name == "model.embed_tokens.weight":
            yield "lm_head.weight", sent


class SharedStream(Weights):
    """Stream of weights with the same buckets on all ranks, which meet in a collective at the end of each bucket.

    A rank that takes the next tensor without having shared its bucket meets the others with nothing to share, as a rank
    does that only runs the stream to its end. ``end`` is the last meeting.

    A tensor larger than ``limit`` bytes is a bucket by itself. ``readers`` counts the server ranks that read this
    rank's buckets; 0 shares none.
    """

    def __init__(self, weights: Weights, limit: int, readers: int, group: ProcessGroup | None) -> None:
        self._weights = weights
        self._limit = limit
        self._readers = readers
        self._group = group
        self._size = 0
        self._next: tuple[str, Tensor] | None = None
        self._has_begun = False
        self._shared: SharedBucket | None = None
        self.complete = False
        """True if the last tensor completed its bucket."""
        self.taken: frozenset[int] = frozenset()
        """Ranks whose bucket the servers have read completely, until the next meeting; set on rank 0."""

    def __next__(self) -> tuple[str, Tensor]:
        if not self._has_begun:
            self._has_begun = True
            self._next = next(self._weights, None)
        if self.complete:
            self.share([])
        if self._next is None:
            raise StopIteration
        item = self._next
        # Look one tensor ahead: all ranks must agree where a bucket ends.
        self._next = next(self._weights, None)
        self._size += item[1].nbytes
        self.complete = self._next is None or self._size + self._next[1].nbytes > self._limit
        return item

    def share(self, tensors: Tensors) -> list[Handle | str | None]:
        """Share a bucket, the widest dtypes first, and meet the other ranks; an empty list shares nothing.

        The previous bucket is freed here, so rank 0 must call this only after the servers have read it. Returns for
        each rank its handle, the reason why it has none, or None where no server reads it.
        """
        self.complete = False
        self._size = 0
        # Before the new bucket is flattened, so that only one is in shared memory.
        self._free()
        shared: Handle | str | None = None
        if tensors and self._readers:
            try:
                self._shared = SharedBucket(flatten_bucket(tensors).data, self._readers)
                shared = self._shared.handle
            except (RuntimeError, OSError) as error:
                shared = str(error)
        return all_gather_objects(shared, self._group)

    def run(self) -> None:
        """Share every bucket; for all ranks except rank 0."""
        bucket = Tensors()
        for item in self:
            bucket.append(item)
            if self.complete:
                # Nothing else may hold the tensors while they are copied.
                del item
                self.share(bucket)
                bucket = Tensors()
        self.end()

    def end(self) -> None:
        """Consume the remaining tensors and free the last bucket. Call it once."""
        for _ in self:
            pass
        self._free()

    def _free(self) -> None:
        taken = broadcast_object(lambda: self.taken, self._group)
        self.taken = frozenset()
        rank = 0 if self._group is None else dist.get_rank(self._group)
        if self._shared is not None:
            self._shared.free(taken=rank in taken)
            self._shared = None


async def shared_buckets(weights: Weights, stream: SharedStream) -> AsyncIterator[Tensors]:
    """Yield the buckets of a shared stream; after each tensor, the other tasks of the event loop run.

    ``weights`` iterates over ``stream``, perhaps through another iterator that computes digests.
    """
    bucket = Tensors()
    for item in weights:
        bucket.append(item)
        await asyncio.sleep(0)
        if stream.complete:
            # Nothing else may hold the tensors while they are copied.
            del item
            yield bucket
            bucket = Tensors()


class HandleTransfer:
    """Transfer on rank 0: the servers read one bucket while the next is gathered."""

    def __init__(self, servers: Sequence[InferenceServer], sharing: MemorySharing) -> None:
        self._servers = list(servers)
        self._owners = sharing.owners

    async def send(self, weights: Weights, stream: SharedStream, attempt: Attempt) -> None:
        """Send the weights to the paused servers, from ``begin_update`` to ``end_update``."""
        for server in attempt.remaining(self._servers):
            num_ranks = attempt.infos[server.url].world_size
            num_planned = len(self._owners[server.url])
            if num_ranks != num_planned:
                text = f"has {num_ranks} ranks, but {num_planned} by its section, [rollout.sglang] or [rollout.vllm]"
                fix = "set the tensor-parallel size there: it decides which GPUs a server has"
                attempt.fail_all([server], f"{text}; {fix}")
        await attempt.call_each(attempt.remaining(self._servers), lambda server: server.begin_update())
        reading: asyncio.Task[None] | None = None
        try:
            async for tensors in shared_buckets(weights, stream):
                if reading is not None:
                    await reading
                reading = self._start(sort_widest_first(tensors), stream, attempt)
                tensors.clear()  # the shared copy is enough
            if reading is not None:
                await reading
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
        await attempt.call_each(attempt.remaining(self._servers), lambda server: server.end_update(attempt.version))

    def _start(self, tensors: Tensors, stream: SharedStream, attempt: Attempt) -> asyncio.Task[None]:
        """Share a bucket and start the servers' reads."""
        bucket = describe_tensors(tensors)
        handles = stream.share(tensors)
        server_handles: dict[str, list[Handle]] = {}
        for server in attempt.remaining(self._servers):
            # A handle is a NamedTuple. A string is the reason why a rank has none.
            shared = [(rank, handles[rank]) for rank in self._owners[server.url]]
            server_handles[server.url] = [handle for _, handle in shared if isinstance(handle, tuple)]
            if problems := sorted({f"rank {rank}: {why}" for rank, why in shared if not isinstance(why, tuple)}):
                attempt.fail_all([server], f"the trainer cannot share the memory of {'; '.join(problems)}")

        async def read() -> None:
            servers = attempt.remaining(self._servers)
            await attempt.call_each(servers, lambda server: server.receive_handles(*bucket, server_handles[server.url]))
            # Servers that failed while they read are not among them: their memory does not count as taken.
            readers = attempt.remaining(servers)
            stream.taken = frozenset(rank for server in readers for rank in self._owners[server.url])

        return asyncio.create_task(read())
