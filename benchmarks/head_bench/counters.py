"""Deterministic counts of a piece of torch code: products, traffic, collectives, peak memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LARGE = 16 * 2**20
"""Bytes above which a tensor does not fit in a cache."""
_PRODUCTS = {"mm": 0, "addmm": 1, "addmm_": 1, "bmm": 0, "baddbmm": 1, "baddbmm_": 1}
"""Operation name -> position of the first factor among its arguments."""
_PICKS = {"gather", "index", "index_select", "scatter", "scatter_", "scatter_add", "scatter_add_", "index_put_"}
_PICKS |= {"scatter_reduce_", "index_add_", "embedding"}
_COLLECTIVES = {"allreduce_": 0, "allgather_": 1, "_allgather_base_": 1, "broadcast_": 0, "reduce_scatter_": 1}
_COLLECTIVES |= {"_reduce_scatter_base_": 1, "alltoall_base_": 1, "alltoall_": 1}
"""Operation name -> position of the input of this rank among its arguments."""
_NO_TRAFFIC = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "is_same_size"}


@dataclass
class Counts:
    """Sums over the operations that were seen."""

    flops: int = 0
    traffic: int = 0
    """Bytes read and written by all operations."""
    large_traffic: int = 0
    """Bytes read and written on tensors above 16 MiB."""
    collectives: list[tuple[str, int]] = field(default_factory=list)
    """Name and input bytes of this rank."""


class Counter(TorchDispatchMode):
    """Counts what torch dispatches while it is active, backward passes on this thread included.

    Every operation that is no view reads its inputs and writes its outputs once; what it fills without reading is only
    written; a gather or a scatter touches as many entries of the large side as it has indices. Work inside one
    operation is invisible (a log-softmax reads its input once).
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if func._schema.name.startswith("c10d::"):
            if name in _COLLECTIVES:
                given = [t for t in tree_leaves(args[_COLLECTIVES[name]]) if isinstance(t, Tensor)]
                self.counts.collectives.append((name.strip("_"), sum(map(_size, given))))
            return result
        if name in _PRODUCTS:
            first, second = args[_PRODUCTS[name]], args[_PRODUCTS[name] + 1]
            self.counts.flops += 2 * first.numel() * second.shape[-1]
        self._add_traffic(func, name, args, kwargs or {}, result)
        return result

    def _add_traffic(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        if name in _NO_TRAFFIC or func.is_view:
            return
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        indices = [t for t in tensors if t.dtype == torch.int64 and t.dim()]
        written_only = [t for t in tree_leaves(kwargs.get("out")) if isinstance(t, Tensor)]
        if name in ("copy_", "fill_", "zero_"):
            written_only.append(tensors[0])
        skip = {id(t) for t in written_only}
        for tensor in [*(t for t in tensors if id(t) not in skip), *outputs]:
            size = _size(tensor)
            if name in _PICKS and indices:
                size = min(size, max(i.numel() for i in indices) * tensor.element_size())
            self.counts.traffic += size
            if size > LARGE:
                self.counts.large_traffic += size


def _size(tensor: Tensor) -> int:
    """Return the bytes of the distinct entries: a dimension of stride 0 counts once."""
    entries = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        entries *= length if stride else min(length, 1)
    return entries * tensor.element_size()


@contextmanager
def counted() -> Iterator[Counts]:
    """Count the operations of the block."""
    with Counter() as counter:
        yield counter.counts


def peak_bytes(function: Callable[[], Any]) -> int:
    """Return the peak bytes that ``function`` allocates on the CPU, beyond what was allocated before.

    From the allocation records of torch's profiler, temporaries inside an operation included. Scratch memory that
    oneDNN takes for itself is not among them.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as records:
        result_alive = function()
    events = [e for e in records.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    del result_alive
    return peak
