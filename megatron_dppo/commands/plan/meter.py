"""What a piece of code allocates, sends and computes, on real tensors and on fake ones alike."""

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

from megatron_dppo.commands.plan.machine import dtype_of, flops_of

HOST = "host"
"""The phase of what is allocated in host memory, on a machine where all memory is the host's: not counted as in use."""

_NOTHING = frozenset({"detach", "alias", "view", "_unsafe_view", "t", "transpose", "expand", "slice", "select"})
_NOTHING |= frozenset({"split", "split_with_sizes", "unbind", "permute", "unsqueeze", "squeeze", "as_strided", "chunk"})
_NOTHING |= frozenset(
    {"empty", "empty_like", "new_empty", "empty_strided", "set_", "lift_fresh", "_local_scalar_dense"}
)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Calls of one kind in one group."""

    phase: str
    name: str
    """as c10d calls it, without the underscore at the end"""
    ranks: tuple[int, ...]
    """of the group"""


@dataclass
class Work:
    """Arithmetic and memory traffic."""

    flops: dict[str, int] = field(default_factory=Counter)
    """by dtype of the products"""
    read_and_written: int = 0
    """bytes of the inputs and outputs of every operation that is not a view; fused kernels move less"""
    seconds: float = 0.0
    """by ``time_of``, operation by operation"""


@dataclass
class Peak:
    """The moment with the most memory in use."""

    total: int = 0
    phase: str = ""
    by_phase: dict[str, int] = field(default_factory=dict)
    """the same bytes by the phase that allocated them"""


class Meter(TorchDispatchMode):
    """Counts while it is entered.

    Bytes are those of storages, from the operation that made them to the end of their last reference.

    Args:
        time_of: seconds of an operation by its FLOPs, their dtype and the bytes that it moves; None = no times.
    """

    def __init__(self, time_of: Callable[[int, torch.dtype, int], float] | None = None) -> None:
        super().__init__()
        self._live: dict[int, tuple[int, str]] = {}
        self._by_phase: Counter[str] = Counter()
        self._kept: set[int] = set()
        self._time_of = time_of
        self.phase = "start"
        self.now = 0
        self.peaks: dict[str, Peak] = {}
        """of each phase"""
        self.work: dict[str, Work] = {}
        self.collectives: Counter[Collective] = Counter()
        self.sent: Counter[Collective] = Counter()
        """bytes that this rank gives, by the same key"""

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """What happens in the block belongs to ``phase``."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    @property
    def peak(self) -> Peak:
        """The highest of all phases."""
        return max(self.peaks.values(), key=lambda peak: peak.total, default=Peak())

    def of_phase(self, phase: str) -> int:
        """Bytes in use that were allocated in it."""
        return self._by_phase[phase]

    def relabel(self, tensors: Sequence[Tensor], phase: str) -> None:
        """What these take up counts for ``phase``, unless a call before has given it away, or it is the host's."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key not in self._live:
                self._see(tensor)
            if self._live[key][1] != HOST:
                self._move(key, phase)

    def to_device(self, tensors: Iterable[Tensor], phase: str) -> None:
        """What was allocated in the phase ``HOST`` and is not the host's counts for ``phase``."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key in self._live and self._live[key][1] == HOST:
                self._move(key, phase)

    def _move(self, key: int, phase: str) -> None:
        if key in self._kept:
            return
        self._kept.add(key)
        size, before = self._live[key]
        self._count(before, -size)
        self._count(phase, size)
        self._live[key] = size, phase

    def __enter__(self) -> Meter:
        """Count from here on, and follow storages whose size is changed in place."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, *args: Any) -> Any:
            result = resize(storage, *args)
            self._resized(storage)
            return result

        self._resize = resize
        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Count no more."""
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def start_step(self) -> None:
        """Forget peaks, work and collectives; what is in use stays."""
        by_phase = {name: size for name, size in self._by_phase.items() if name != HOST}
        self.peaks = {self.phase: Peak(self.now, self.phase, by_phase)}
        self.work.clear()
        self.collectives.clear()
        self.sent.clear()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation and count it."""
        out = func(*args, **(kwargs or {}))
        if func.namespace == "prim":
            return out
        if func.namespace == "c10d":
            self._count_collective(func, args)
            return out
        made = _tensors(out)
        for tensor in made:
            self._see(tensor)
        self._count_work(func, args, kwargs or {}, out, made)
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        self._live[key] = 0, self.phase
        weakref.finalize(storage, self._gone, key).atexit = False
        self._resized(storage)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._live:
            return
        old, phase = self._live[key]
        self._live[key] = size, phase
        self._count(phase, size - old)

    def _gone(self, key: int) -> None:
        size, phase = self._live.pop(key)
        self._count(phase, -size)

    def _count(self, phase: str, size: int) -> None:
        self._by_phase[phase] += size
        if phase == HOST:
            return
        self.now += size
        before = self.peaks.get(self.phase)
        if size > 0 and (before is None or self.now > before.total):
            by_phase = {name: size for name, size in self._by_phase.items() if size and name != HOST}
            self.peaks[self.phase] = Peak(self.now, self.phase, by_phase)

    def _count_collective(self, func: Any, args: Sequence[Any]) -> None:
        name = func._schema.name.removeprefix("c10d::").removesuffix("_")
        if name in ("barrier", "monitored_barrier"):
            return
        ranks = next(found for found in map(_ranks, args) if found is not None)
        key = Collective(phase=self.phase, name=name, ranks=ranks)
        given = args[0] if name in _IN_PLACE else args[1]
        self.collectives[key] += 1
        self.sent[key] += sum(tensor.nbytes for tensor in _tensors(given))

    def _count_work(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, made: Sequence[Tensor]
    ) -> None:
        if func._schema.name.removeprefix("aten::") in _NOTHING:
            return
        work = self.work.setdefault(self.phase, Work())
        used = _tensors((args, dict(kwargs)))
        moved = sum(tensor.nbytes for tensor in used) + sum(tensor.nbytes for tensor in made)
        flops, dtype = flops_of(func, args, kwargs, out), dtype_of(func, args, used)
        if flops:
            work.flops[str(dtype).removeprefix("torch.")] += flops
        work.read_and_written += moved
        if self._time_of is not None:
            work.seconds += self._time_of(flops, dtype, moved)


_IN_PLACE = frozenset({"allreduce", "broadcast", "send", "recv_", "recv", "allreduce_coalesced"})
"""Collectives whose first argument is what this rank gives; elsewhere that is the second."""


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _ranks(argument: object) -> tuple[int, ...] | None:
    """The ranks of a process group as c10d's operations get it."""
    if not isinstance(argument, torch.ScriptObject):
        return None
    try:
        group = dist.ProcessGroup.unbox(argument)
    except (RuntimeError, TypeError):
        return None
    return tuple(dist.get_process_group_ranks(group))
