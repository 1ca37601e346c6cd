"""Meter of memory, collectives and arithmetic of a piece of code, on real or fake tensors."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_dppo_plan.machine import compute_dtype, count_flops

HOST = "host"
"""Phase of allocations in host memory, which do not count as in use on the device.

A rehearsal runs on the CPU, so only the phase separates the two.
"""

_ALLOCATIONS = ("empty", "empty_like", "new_empty", "empty_strided")
_FREE_OPERATIONS = (*_ALLOCATIONS, "_unsafe_view", "set_", "_local_scalar_dense")
"""Operations that move no data and are no views: allocations, a view by another name, reads of a value."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Kind of collective call: its phase, name and group."""

    phase: str
    name: str
    """Name in c10d, without a trailing underscore."""
    ranks: tuple[int, ...]


@dataclass
class Work:
    """Arithmetic and memory traffic."""

    flops: dict[str, int] = field(default_factory=Counter)
    """FLOPs by dtype."""
    bytes_moved: int = 0
    """Bytes of inputs and outputs of every operation except views. Fused kernels move less."""
    seconds: float = 0.0
    """Sum of ``time_of`` over operations."""


@dataclass
class Peak:
    """The moment with the most memory in use."""

    total: int = 0
    phase: str = ""
    by_phase: dict[str, int] = field(default_factory=dict)
    """Bytes by the phase that allocated them."""


class Meter(TorchDispatchMode):
    """Dispatch mode that counts memory, collectives and arithmetic.

    Memory is the size of storages, from the operation that creates one until its last reference is gone. ``time_of``
    maps FLOPs, dtype and moved bytes of an operation to seconds. None measures no times.
    """

    def __init__(self, time_of: Callable[[int, torch.dtype, int], float] | None = None) -> None:
        super().__init__()
        self._live: dict[int, tuple[int, str]] = {}
        self._by_phase: Counter[str] = Counter()
        self._relabeled: set[int] = set()
        self._time_of = time_of
        self.phase = "start"
        self.bytes_in_use = 0
        self.peaks: dict[str, Peak] = {}
        self.work: dict[str, Work] = {}
        self.collectives: Counter[Collective] = Counter()
        self.sent: Counter[Collective] = Counter()
        """Input bytes of this rank, by the same key."""

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Attribute the block to ``phase``."""
        before = self.phase
        self.phase = phase
        try:
            yield
        finally:
            self.phase = before

    @property
    def peak(self) -> Peak:
        """Highest peak of all phases."""
        return max(self.peaks.values(), key=lambda peak: peak.total, default=Peak())

    def bytes_in_phase(self, phase: str) -> int:
        """Return the bytes in use that the phase allocated."""
        return self._by_phase[phase]

    def relabel(self, tensors: Sequence[Tensor], phase: str) -> None:
        """Attribute the memory of tensors to ``phase``.

        Storages that an earlier call relabeled, or that are in host memory, stay as they are.
        """
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key not in self._live:
                self._track(tensor)
            if self._live[key][1] != HOST:
                self._assign_phase(key, phase)

    def relabel_device_tensors(self, tensors: Iterable[Tensor], phase: str) -> None:
        """Attribute device tensors that were allocated in the phase ``HOST`` to ``phase``."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key in self._live and self._live[key][1] == HOST:
                self._assign_phase(key, phase)

    def _assign_phase(self, key: int, phase: str) -> None:
        if key in self._relabeled:
            return
        self._relabeled.add(key)
        size, before = self._live[key]
        self._count(before, -size)
        self._count(phase, size)
        self._live[key] = size, phase

    def __enter__(self) -> Meter:
        """Start counting. Also follow storages that are resized in place, which dispatches no operation."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, *args: Any) -> Any:
            result = resize(storage, *args)
            self._update_size(storage)
            return result

        self._resize = resize
        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop counting."""
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def start_step(self) -> None:
        """Reset peaks, work and collectives, but not the memory in use."""
        by_phase = {name: size for name, size in self._by_phase.items() if name != HOST}
        self.peaks = {self.phase: Peak(self.bytes_in_use, self.phase, by_phase)}
        self.work.clear()
        self.collectives.clear()
        self.sent.clear()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation and count it."""
        out = func(*args, **(kwargs or {}))
        if func.namespace == "prim":
            return out
        if func.namespace == "c10d":
            self._count_collective(func, args)
            return out
        outputs = _tensors(out)
        for tensor in outputs:
            self._track(tensor)
        self._count_work(func, args, kwargs or {}, out, outputs)
        return out

    def _track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        self._live[key] = 0, self.phase
        # torch keeps the Python object of a storage as long as the storage lives.
        weakref.finalize(storage, self._release, key).atexit = False
        self._update_size(storage)

    def _update_size(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._live:
            return
        old, phase = self._live[key]
        self._live[key] = size, phase
        self._count(phase, size - old)

    def _release(self, key: int) -> None:
        size, phase = self._live.pop(key)
        self._count(phase, -size)

    def _count(self, phase: str, size: int) -> None:
        self._by_phase[phase] += size
        if phase == HOST:
            return
        self.bytes_in_use += size
        peak = self.peaks.get(self.phase)
        if size > 0 and (peak is None or self.bytes_in_use > peak.total):
            by_phase = {name: size for name, size in self._by_phase.items() if size and name != HOST}
            self.peaks[self.phase] = Peak(self.bytes_in_use, self.phase, by_phase)

    def _count_collective(self, func: Any, args: Sequence[Any]) -> None:
        name = func._schema.name.removeprefix("c10d::").removesuffix("_")
        if name in ("barrier", "monitored_barrier"):
            return
        ranks = next(ranks for ranks in map(_group_ranks, args) if ranks is not None)
        key = Collective(phase=self.phase, name=name, ranks=ranks)
        sent = args[0] if name in _IN_PLACE else args[1]
        self.collectives[key] += 1
        self.sent[key] += sum(tensor.nbytes for tensor in _tensors(sent))

    def _count_work(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, outputs: Sequence[Tensor]
    ) -> None:
        if func.is_view or func._schema.name.removeprefix("aten::") in _FREE_OPERATIONS:
            return
        work = self.work.setdefault(self.phase, Work())
        inputs = _tensors((args, dict(kwargs)))
        moved = sum(tensor.nbytes for tensor in inputs) + sum(tensor.nbytes for tensor in outputs)
        flops = count_flops(func, args, kwargs, out)
        dtype = compute_dtype(func, args, inputs)
        if flops:
            work.flops[str(dtype).removeprefix("torch.")] += flops
        work.bytes_moved += moved
        if self._time_of is not None:
            work.seconds += self._time_of(flops, dtype, moved)


_IN_PLACE = frozenset({"allreduce", "broadcast", "send", "recv_", "recv", "allreduce_coalesced"})
"""Collectives whose first argument is the input of this rank. For all others it is the second."""


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _group_ranks(argument: object) -> tuple[int, ...] | None:
    """Return the ranks of a process group in the form that c10d operations receive. None for other arguments."""
    if not isinstance(argument, torch.ScriptObject):
        return None
    try:
        group = dist.ProcessGroup.unbox(argument)
    except (RuntimeError, TypeError):
        return None
    return tuple(dist.get_process_group_ranks(group))
