"""Which collectives a piece of code starts, and how many bytes each rank gives to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

# name -> position of the tensor that this rank gives
_GIVEN = {
    "all_reduce": 0,
    "all_gather": 1,
    "all_gather_into_tensor": 1,
    "all_to_all": 1,
    "all_to_all_single": 1,
    "broadcast": 0,
    "gather": 0,
    "reduce": 0,
    "reduce_scatter": 1,
    "reduce_scatter_tensor": 1,
    "send": 0,
}


@contextmanager
def recorded_collectives() -> Iterator[list[tuple[str, int]]]:
    """The calls so far: ("all_reduce MAX", bytes) and the like, in order."""
    calls: list[tuple[str, int]] = []
    original = {name: getattr(dist, name) for name in _GIVEN}

    def recording(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = args[_GIVEN[name]]
            size = sum(t.numel() * t.element_size() for t in ([given] if isinstance(given, Tensor) else given))
            if name == "all_reduce":
                operation = args[1] if len(args) > 1 else kwargs.get("op", dist.ReduceOp.SUM)
                calls.append((f"all_reduce {'MAX' if operation == dist.ReduceOp.MAX else 'SUM'}", size))
            else:
                calls.append((name, size))
            return original[name](*args, **kwargs)

        return call

    for name in _GIVEN:
        setattr(dist, name, recording(name))
    try:
        yield calls
    finally:
        for name, function in original.items():
            setattr(dist, name, function)
