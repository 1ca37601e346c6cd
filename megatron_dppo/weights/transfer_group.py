"""The trainer's side of a weight broadcast to inference servers, which are other programs with their own torch."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Backend, _get_default_group, _new_process_group_helper, _world

from megatron_dppo.types import as_bytes


@contextmanager
def unbound_default_group() -> Iterator[None]:
    """Groups that are made here are not split from the default group's NCCL communicator.

    Where ``init_process_group`` got a ``device_id``, torch makes every further NCCL group by ``ncclCommSplit`` of the
    default one (``split_from`` in ``_new_process_group_helper``). That call waits for all ranks of the default group,
    of which only one is a member here.
    """
    default = _get_default_group() if dist.is_initialized() else None
    bound = None if default is None else default.bound_device_id
    if default is None or bound is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound


def open_transfer_group(
    host: str,
    port: int,
    *,
    name: str,
    rank: int,
    world_size: int,
    backend: str,
    timeout: float = 300.0,
    listening: socket.socket | None = None,
) -> ProcessGroup:
    """A group besides the trainer's own, joined by servers (SGLang's ``init_weights_update_group``).

    Returns when all ``world_size`` ranks are there. The store is made directly and not by torch's ``tcp://``
    rendezvous: under torchrun that one uses the launcher's store and adds a prefix, so the servers would not be found.

    Args:
        host: where rank 0 listens; all ranks must reach it.
        port: a free port of rank 0.
        name: of the group, the same on all ranks.
        rank: of this process; 0 makes the store.
        world_size: trainer ranks and server ranks.
        backend: ``nccl`` or ``gloo``, the same on all ranks.
        timeout: seconds to wait for the others, and of each broadcast.
        listening: rank 0's, at ``host`` and ``port``; taken over. None = a new one.

    Raises:
        OSError: rank 0 cannot listen there.
        torch.distributed.DistStoreError: somebody did not come in time.
    """
    limit = timedelta(seconds=timeout)
    # Given a socket, the store listens on this address alone; by itself it would on all of them.
    handle = (listening or socket.create_server((host, port))).detach() if rank == 0 else None
    store = TCPStore(host, port, world_size, rank == 0, timeout=limit, master_listen_fd=handle)
    # The public new_group wants all members in one default group. SGLang, slime and verl use this function likewise.
    with unbound_default_group():
        group, _ = _new_process_group_helper(
            world_size,
            rank,
            [],
            Backend(backend),
            PrefixStore(name, store),
            group_name=name,  # type: ignore[arg-type]
            timeout=limit,
        )
    _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


class TensorBucket(NamedTuple):
    """Tensors laid end to end."""

    names: list[str]
    dtypes: list[str]
    """``bfloat16``, ``float32``, ..."""
    shapes: list[list[int]]
    data: Tensor
    """[bytes] uint8"""


def widest_first(tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """In the order of a bucket: laid end to end, each tensor then starts at a multiple of its item size."""
    return sorted(tensors, key=lambda item: -item[1].element_size())


def described(tensors: Sequence[tuple[str, Tensor]]) -> tuple[list[str], list[str], list[list[int]]]:
    """Names, dtypes and shapes, as in ``TensorBucket``."""
    dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors]
    return [name for name, _ in tensors], dtypes, [list(tensor.shape) for _, tensor in tensors]


def flatten_bucket(tensors: Sequence[tuple[str, Tensor]]) -> TensorBucket:
    """One buffer of all of them, the widest types first.

    Args:
        tensors: at least one, all on one device.
    """
    ordered = widest_first(tensors)
    return TensorBucket(*described(ordered), data=torch.cat([as_bytes(tensor) for _, tensor in ordered]))


def broadcast_bucket(bucket: TensorBucket, group: ProcessGroup, stream: torch.cuda.Stream | None = None) -> None:
    """Send from rank 0 of the group; the servers must have been asked to receive (the call blocks until they do).

    Args:
        bucket: what is sent; its memory is free afterwards.
        group: with NCCL or gloo.
        stream: of a bucket on a GPU; one that waits for its bytes already.
    """
    with torch.cuda.stream(stream):
        dist.broadcast(bucket.data, group=group, group_src=0)
    if stream is not None:
        stream.synchronize()


def sending_stream(data: Tensor) -> torch.cuda.Stream | None:
    """For a broadcast beside the caller's stream: what that one gathers next must not wait until this has left."""
    if data.device.type != "cuda":
        return None
    stream = torch.cuda.Stream(data.device)
    stream.wait_stream(torch.cuda.current_stream(data.device))
    return stream


def close_transfer_group(group: ProcessGroup) -> None:
    """Leave the group."""
    dist.destroy_process_group(group)


class GroupTransport(Protocol):
    """How buckets get from rank 0 to servers that form a group with it."""

    def listen(self, host: str) -> tuple[Any, int]:
        """Take a free port of ``host``: something that listens there, and the port.

        Raises:
            OSError: ``host`` is no address of this machine.
        """

    async def open(self, listener: Any, *, name: str, world_size: int, backend: str, timeout: float) -> Any:
        """The group, once all have come.

        Raises:
            RuntimeError: somebody did not come in time.
        """

    async def broadcast(self, bucket: TensorBucket, group: Any) -> None:
        """Send to all members.

        Raises:
            RuntimeError: the group is broken.
        """

    def close(self, group: Any) -> None:
        """Leave the group; a broadcast that is under way breaks off."""


class TorchTransport:
    """A process group of torch, which blocks: each call runs in a thread of its own."""

    def listen(self, host: str) -> tuple[socket.socket, int]:
        """See ``GroupTransport``. The port is kept from here on, so that nobody can take it in between."""
        listener = socket.create_server((host, 0))
        return listener, int(listener.getsockname()[1])

    async def open(
        self, listener: socket.socket, *, name: str, world_size: int, backend: str, timeout: float
    ) -> ProcessGroup:
        """See ``GroupTransport``."""
        host, port = listener.getsockname()[:2]
        return await asyncio.to_thread(
            open_transfer_group,
            host,
            port,
            name=name,
            rank=0,
            world_size=world_size,
            backend=backend,
            timeout=timeout,
            listening=listener,
        )

    async def broadcast(self, bucket: TensorBucket, group: ProcessGroup) -> None:
        """See ``GroupTransport``."""
        await asyncio.to_thread(broadcast_bucket, bucket, group, sending_stream(bucket.data))

    def close(self, group: ProcessGroup) -> None:
        """See ``GroupTransport``."""
        close_transfer_group(group)
