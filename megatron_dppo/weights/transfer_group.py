"""Trainer side of a weight broadcast to inference servers, which are other programs with their own torch."""

import asyncio
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Backend, _get_default_group, _new_process_group_helper, _world

from megatron_dppo.types import as_bytes


@contextmanager
def unbound_default_group() -> Iterator[None]:
    """Keep torch from splitting new groups off the default group's NCCL communicator.

    If ``init_process_group`` got a ``device_id``, torch creates every further NCCL group by ``ncclCommSplit`` from the
    default group (``split_from`` in ``_new_process_group_helper``). That call waits for all ranks of the default group,
    but only one of them is a member of a transfer group.
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


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at an IPv4 or IPv6 address, or at the first one of a host name."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family)


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
    """Open a group that servers join (SGLang's ``init_weights_update_group``), apart from the trainer's groups.

    Returns when all ``world_size`` ranks have joined. An OSError if rank 0 cannot listen at ``host`` and ``port`` (or
    on the socket ``listening``), torch's DistStoreError if a rank does not join within ``timeout`` seconds, which also
    limit each broadcast. The store is created directly: under torchrun torch's ``tcp://`` rendezvous uses the
    launcher's store with a prefix, where servers are not found.
    """
    limit = timedelta(seconds=timeout)
    # With a given socket, the store listens on this address only; by itself it would listen on all addresses.
    handle = (listening or listen(host, port)).detach() if rank == 0 else None
    store = TCPStore(host, port, world_size, rank == 0, timeout=limit, master_listen_fd=handle)
    # The public new_group requires all members to be in one default group. SGLang, slime and verl also use the helper.
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
    """Tensors laid end to end in one buffer."""

    names: list[str]
    dtypes: list[str]
    """Names of torch dtypes: ``bfloat16``, ``float32``, ..."""
    shapes: list[list[int]]
    data: Tensor
    """Bytes of all tensors. Shape [num_bytes], uint8."""


def sort_widest_first(tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Sort into the order of a bucket, in which each tensor starts at a multiple of its item size."""
    return sorted(tensors, key=lambda item: -item[1].element_size())


def describe_tensors(tensors: Sequence[tuple[str, Tensor]]) -> tuple[list[str], list[str], list[list[int]]]:
    """Return names, dtypes and shapes, as in ``TensorBucket``."""
    dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors]
    return [name for name, _ in tensors], dtypes, [list(tensor.shape) for _, tensor in tensors]


def flatten_bucket(tensors: Sequence[tuple[str, Tensor]]) -> TensorBucket:
    """Copy tensors of one device into one buffer, the widest dtypes first."""
    ordered = sort_widest_first(tensors)
    return TensorBucket(*describe_tensors(ordered), data=torch.cat([as_bytes(tensor) for _, tensor in ordered]))


def broadcast_bucket(bucket: TensorBucket, group: ProcessGroup, stream: torch.cuda.Stream | None = None) -> None:
    """Send a bucket from rank 0, on a ``stream`` that waits for its bytes; blocks until the servers have it."""
    with torch.cuda.stream(stream):
        dist.broadcast(bucket.data, group=group, group_src=0)
    # The caller reuses the memory, so the bytes must have been sent.
    if stream is not None:
        stream.synchronize()


def sending_stream(data: Tensor) -> torch.cuda.Stream | None:
    """Return a CUDA stream for a broadcast that overlaps with the caller's stream; None on a CPU."""
    if data.device.type != "cuda":
        return None
    stream = torch.cuda.Stream(data.device)
    stream.wait_stream(torch.cuda.current_stream(data.device))
    return stream


def close_transfer_group(group: ProcessGroup) -> None:
    """Leave the group."""
    dist.destroy_process_group(group)


class TorchTransport:
    """Transport of buckets from rank 0 to servers in one group of torch. Its calls block, so each runs in a thread."""

    def listen(self, host: str) -> tuple[socket.socket, int]:
        """Listen on a free port of ``host``, else an OSError; return the socket, which reserves it, and the port."""
        listener = listen(host)
        return listener, int(listener.getsockname()[1])

    async def open(
        self, listener: socket.socket, *, name: str, world_size: int, backend: str, timeout: float
    ) -> ProcessGroup:
        """Return the group when all members have joined; a RuntimeError if one did not in time."""
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
        """Send a bucket to all members; a RuntimeError if the group is broken."""
        await asyncio.to_thread(broadcast_bucket, bucket, group, sending_stream(bucket.data))

    def close(self, group: ProcessGroup) -> None:
        """Leave the group; a broadcast in flight fails."""
        close_transfer_group(group)
