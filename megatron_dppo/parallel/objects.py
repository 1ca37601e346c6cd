"""Python objects between the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

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
