"""Python objects between the ranks of a group."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

T = TypeVar("T")


def is_leader(group: ProcessGroup | None) -> bool:
    """Whether this rank is the first of the group."""
    return group is None or dist.get_rank(group) == 0


def from_leader(make: Callable[[], T], group: ProcessGroup | None) -> T:
    """What ``make`` returns on the first rank of the group; the others receive it (pickled, between our own ranks)."""
    if group is None or dist.get_world_size(group) == 1:
        return make()
    box: list[T | None] = [make() if is_leader(group) else None]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]  # type: ignore[return-value]


def agreed(make: Callable[[], T], group: ProcessGroup | None) -> T:
    """As ``from_leader``; an exception on the first rank is raised on all, so that none waits for the others."""

    def attempt() -> tuple[T | None, Exception | None]:
        try:
            return make(), None
        except Exception as error:
            return None, error

    value, error = from_leader(attempt, group)
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def from_each(value: T, group: ProcessGroup | None) -> list[T]:
    """The values of all ranks of the group, in their order (pickled, between our own ranks)."""
    size = 1 if group is None else dist.get_world_size(group)
    if size == 1:
        return [value]
    values: list[T | None] = [None] * size
    dist.all_gather_object(values, value, group=group)
    return values  # type: ignore[return-value]


def exchange(outgoing: Sequence[Sequence[T]], group: ProcessGroup) -> list[T]:
    """Send ``outgoing[r]`` to rank r of the group; returns what came in, in the order of the senders.

    Pickled, between our own ranks. Two collectives: the sizes, then one all-to-all of the bytes.

    Args:
        outgoing: one list for each rank, this one included.
        group: over the CPU; a collective of all its ranks.
    """
    packed = [pickle.dumps(list(items)) for items in outgoing]
    sizes = torch.tensor([len(data) for data in packed])
    incoming = torch.empty_like(sizes)
    dist.all_to_all_single(incoming, sizes, group=group)
    sent = torch.frombuffer(bytearray(b"".join(packed)), dtype=torch.uint8)
    received = torch.empty(int(incoming.sum()), dtype=torch.uint8)
    dist.all_to_all_single(received, sent, incoming.tolist(), sizes.tolist(), group=group)
    parts = received.split(incoming.tolist())
    return [item for part in parts for item in pickle.loads(part.numpy().tobytes())]
