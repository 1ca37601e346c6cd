"""The trainer's side of a weight broadcast to inference servers, which are other programs with their own torch."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world


def open_transfer_group(
    host: str, port: int, *, name: str, rank: int, world_size: int, backend: str, timeout: float = 300.0
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

    Raises:
        OSError: rank 0 cannot listen there.
        torch.distributed.DistStoreError: somebody did not come in time.
    """
    limit = timedelta(seconds=timeout)
    # Given a socket, the store listens on this address alone; by itself it would on all of them.
    listening = socket.create_server((host, port)).detach() if rank == 0 else None
    store = TCPStore(host, port, world_size, rank == 0, timeout=limit, master_listen_fd=listening)
    # The public new_group wants all members in one default group. SGLang, slime and verl use this function likewise.
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


class Bucket(NamedTuple):
    """Tensors laid end to end."""

    names: list[str]
    dtypes: list[str]
    """``bfloat16``, ``float32``, ..."""
    shapes: list[list[int]]
    data: Tensor
    """[bytes] uint8"""


def flatten_bucket(tensors: Sequence[tuple[str, Tensor]]) -> Bucket:
    """One buffer of all of them, the widest types first: each tensor then starts at a multiple of its item size.

    Args:
        tensors: at least one, all on one device.
    """
    ordered = sorted(tensors, key=lambda item: -item[1].element_size())
    return Bucket(
        names=[name for name, _ in ordered],
        dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in ordered],
        shapes=[list(tensor.shape) for _, tensor in ordered],
        data=torch.cat([tensor.detach().contiguous().view(-1).view(torch.uint8) for _, tensor in ordered]),
    )


def broadcast_bucket(bucket: Bucket, group: ProcessGroup) -> None:
    """Send from rank 0 of the group; the servers must have been asked to receive (the call blocks until they do)."""
    dist.broadcast(bucket.data, group=group, group_src=0)


def close_transfer_group(group: ProcessGroup) -> None:
    """Leave the group."""
    dist.destroy_process_group(group)
