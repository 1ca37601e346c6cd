"""Collectives of Python objects between the ranks of a group."""

import io
import math
import pickle
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

T = TypeVar("T")
Need = TypeVar("Need", bound=Hashable)


def is_leader(group: ProcessGroup | None) -> bool:
    """Return True on the first rank of the group, the leader."""
    return group is None or dist.get_rank(group) == 0


def broadcast_object(make: Callable[[], T], group: ProcessGroup | None) -> T:
    """Call ``make`` on the first rank of the group and broadcast its result to all ranks.

    Tensors and arrays are sent as raw bytes; the objects that hold them are pickled. Pickle is safe here, because all
    ranks belong to one run.
    """
    if group is None or dist.get_world_size(group) == 1:
        return make()
    if is_leader(group):
        value = make()
        _transfer(to_message(value), partial(dist.broadcast, group=group, group_src=0))
        return value
    return from_message(_transfer(None, partial(dist.broadcast, group=group, group_src=0)))


def scatter_object(
    make: Callable[[], T], group: ProcessGroup | None, needs: Sequence[Need], part: Callable[[T, Need], T]
) -> T:
    """Call ``make`` on the first rank of the group, which keeps the value, and send each other rank its part.

    ``needs`` of all ranks are known to all; ``part`` returns the part of a value for the needs of a rank. All ranks of
    the CPU group must call.
    """
    if group is None or len(set(needs)) == 1:
        return broadcast_object(make, group)
    if not is_leader(group):
        return from_message(_transfer(None, partial(dist.recv, group=group, group_src=0)))
    value = make()
    # Ranks with equal needs share one message, which is made once.
    for need in dict.fromkeys(needs[1:]):
        message = to_message(part(value, need))
        for rank in (rank for rank, wanted in enumerate(needs) if rank and wanted == need):
            _transfer(message, partial(dist.send, group=group, group_dst=rank))
    return value


def run_on_leader(make: Callable[[], T], group: ProcessGroup | None) -> T:
    """Call ``make`` on the first rank; all return its result or raise its exception, so that none waits forever."""

    def attempt() -> tuple[T | None, Exception | None]:
        try:
            return make(), None
        except Exception as error:
            return None, error

    value, error = broadcast_object(attempt, group)
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def all_gather_objects(value: T, group: ProcessGroup | None) -> list[T]:
    """Gather the values of all ranks of the group on all ranks, in rank order. Values are pickled."""
    size = 1 if group is None else dist.get_world_size(group)
    if size == 1:
        return [value]
    values: list[T | None] = [None] * size
    dist.all_gather_object(values, value, group=group)
    return values  # type: ignore[return-value]


def all_gather(local: Tensor, group: ProcessGroup | None) -> list[Tensor]:
    """Return the tensors of all ranks of a group, which have the same shape."""
    size = dist.get_world_size(group)
    if size == 1:
        return [local]
    gathered = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(size)]
    dist.all_gather(gathered, local.contiguous(), group=group)
    return gathered


def gather_objects(value: T, group: ProcessGroup | None) -> list[T]:
    """Gather the values of all ranks on the first rank, in rank order, without pickling tensors; others get []."""
    size = 1 if group is None else dist.get_world_size(group)
    if group is None or size == 1:
        return [value]
    if not is_leader(group):
        _transfer(to_message(value), partial(dist.send, group=group, group_dst=0))
        return []
    messages = (_transfer(None, partial(dist.recv, group=group, group_src=rank)) for rank in range(1, size))
    return [value, *map(from_message, messages)]


def all_to_all_objects(outgoing: Sequence[Sequence[T]], group: ProcessGroup) -> list[T]:
    """Send ``outgoing[r]`` to rank r of the group and return the received items, in the order of the senders.

    Tensors are not pickled, as in ``broadcast_object``. Two collectives: the sizes, then one all-to-all of the bytes.
    """
    packed = [to_message(list(items)) for items in outgoing]
    sizes = torch.tensor([len(data) for data in packed])
    incoming = torch.empty_like(sizes)
    dist.all_to_all_single(incoming, sizes, group=group)
    # The first all-to-all told every rank what it will receive: gloo needs exact sizes.
    received = torch.empty(int(incoming.sum()), dtype=torch.uint8)
    dist.all_to_all_single(received, torch.cat(packed), incoming.tolist(), sizes.tolist(), group=group)
    return [item for part in received.split(incoming.tolist()) for item in from_message(part)]


def _transfer(message: Tensor | None, move: Callable[[Tensor], object]) -> Tensor:
    """Send a message by ``move``, or receive one (None), in parts; return it."""
    size = torch.tensor([0 if message is None else len(message)])
    # The size first, because the receivers must allocate the message.
    move(size)
    message = torch.empty(int(size), dtype=torch.uint8) if message is None else message
    for part in message.split(_LARGEST):
        move(part)
    return message


_LARGEST = 1 << 30
_ALIGNED = 16
"""Alignment of tensors in a message, in bytes. No number of a tensor is longer."""
_TensorRef = tuple[int, torch.dtype, tuple[int, ...], bool]
"""Reference to a tensor in a message: first byte, dtype, shape, and True for a NumPy array."""


class _Pickler(pickle.Pickler):
    """Pickler that replaces tensors and arrays by references.

    Of a view only the numbers of the view are sent; PyTorch would pickle its whole storage.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.size = _ALIGNED
        self.tensors: list[tuple[int, Tensor]] = []

    def persistent_id(self, obj: Any) -> _TensorRef | None:
        is_array = type(obj) is np.ndarray and obj.dtype.kind in "biuf" and obj.dtype.isnative
        if not is_array and (type(obj) is not Tensor or obj.device.type != "cpu" or obj.layout != torch.strided):
            return None
        # NumPy's arrays may be read-only, which nothing here changes.
        tensor = torch.from_numpy(obj if obj.flags.writeable else obj.copy()) if is_array else obj
        start = self.size
        # Only the place is noted here: the message is allocated when the size of the pickle is known too.
        self.tensors.append((start, tensor))
        self.size += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        return start, tensor.dtype, tuple(tensor.shape), is_array


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, message: Tensor) -> None:
        super().__init__(file)
        self._message = message

    def persistent_load(self, pid: _TensorRef) -> Tensor | NDArray[Any]:
        start, dtype, shape, is_array = pid
        raw = self._message[start : start + math.prod(shape) * dtype.itemsize]
        tensor = raw.view(dtype).view(shape)
        return tensor.numpy() if is_array else tensor


def to_message(value: Any) -> Tensor:
    """Return the message of a value, uint8: offset of the pickle, numbers of all tensors, pickle."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    pickled = file.getbuffer()
    message = torch.zeros(-(-(pickler.size + len(pickled)) // _ALIGNED) * _ALIGNED, dtype=torch.uint8)
    # Tensors start at byte 16, because the first 8 bytes hold the offset of the pickle behind them.
    message[:8] = torch.tensor([pickler.size]).view(torch.uint8)
    for start, tensor in pickler.tensors:
        if tensor.numel():
            message[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    message[pickler.size : pickler.size + len(pickled)] = torch.frombuffer(pickled, dtype=torch.uint8)
    return message


def from_message(message: Tensor) -> Any:
    """Return the value of a message. Its tensors are views of ``message``."""
    offset = int(message[:8].view(torch.int64))
    return _Unpickler(io.BytesIO(message[offset:].numpy().tobytes()), message).load()
