"""Memory of this process that another one opens where it is: on a GPU by CUDA IPC, on the host as POSIX shared memory.

A handle says where the bytes are, in the fields of torch's own sharing between processes (``torch.multiprocessing``).
Both sides need a torch whose handles have the same form: 2.5 or later on GPUs.
"""

from __future__ import annotations

import base64
import math
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing import reductions

_SHARED_MEMORY = Path("/dev/shm")


class HostHandle(NamedTuple):
    """A file of shared memory. Torch's manager process removes it when this one is killed."""

    name: bytes
    size: int
    """bytes"""


class DeviceHandle(NamedTuple):
    """A part of one allocation on a GPU; the fields are those of ``rebuild_cuda_tensor``."""

    device: str
    """UUID of the GPU: each process counts its devices by itself"""
    handle: bytes
    size: int
    """bytes"""
    offset: int
    """bytes from the start of the allocation"""
    counter: bytes
    """where the one reader says that it has finished"""
    counter_offset: int
    event: bytes
    """after which the bytes are there"""
    event_sync: bool


Handle = HostHandle | DeviceHandle


class SharedBucket:
    """Bytes that others may read until ``free``.

    Args:
        data: [bytes] uint8, the whole of its storage; nothing writes to it any more.
        readers: how many processes open it on a CPU; on a GPU it is one.

    Raises:
        RuntimeError: this memory cannot be shared.
    """

    def __init__(self, data: Tensor, readers: int) -> None:
        self._data: Tensor | None = data
        storage = data.untyped_storage()
        self.handle: Handle
        if data.device.type == "cuda":
            _, handle, size, offset, *rest = storage._share_cuda_()
            uuid = str(torch.cuda.get_device_properties(data.device).uuid)
            self.handle = DeviceHandle(uuid, handle, size, offset, *rest)
            return
        _, *where = storage._share_filename_cpu_()
        self.handle = HostHandle(*where)
        # One for each reader, and one so that torch never counts to 0 and removes the file: of a file that is gone it
        # would end the process.
        for _ in range(readers + 1):
            storage._shared_incref()

    def free(self, *, taken: bool) -> None:
        """Give the memory back.

        Args:
            taken: its reader has finished with it. On a GPU torch keeps the memory until a reader has said so, and for
                ever when that died before; then this process says it.
        """
        handle = self.handle
        if isinstance(handle, HostHandle):
            (_SHARED_MEMORY / handle.name.decode().lstrip("/")).unlink(missing_ok=True)
        elif not taken:
            torch.UntypedStorage._release_ipc_counter_cuda(handle.counter, handle.counter_offset)
        self._data = None
        if isinstance(handle, DeviceHandle):
            torch.cuda.ipc_collect()


def as_json(handle: Handle) -> dict[str, Any]:
    """The fields, bytes as base64."""
    fields = handle._asdict().items()
    return {name: base64.b64encode(value).decode() if isinstance(value, bytes) else value for name, value in fields}


class _Call:
    """Becomes ``function(*args)`` where it is unpickled."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._reduced = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._reduced


def as_flattened_bucket(
    handle: Handle, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> bytes:
    """The pickle that SGLang takes as a ``flattened_bucket``; only names that its unpickler allows are in it.

    SGLang reads the places of the tensors as attributes, of whatever class (``_update_weights_from_flattened_bucket``),
    and replaces the device of a GPU's tensor, its UUID, by its own number of it (``utils/patch_torch.py``).
    """
    places, start = [], 0
    for name, kind, shape in zip(names, dtypes, shapes, strict=True):
        dtype = getattr(torch, kind)
        size = math.prod(shape) * dtype.itemsize
        place = {"name": name, "shape": tuple(shape), "dtype": dtype, "numel": size}
        places.append(SimpleNamespace(**place, start_idx=start, end_idx=start + size))
        start += size
    return pickle.dumps({"flattened_tensor": _rebuilt(handle), "metadata": places})


def _rebuilt(handle: Handle) -> _Call:
    """What ``ForkingPickler`` would write of the tensor of bytes."""
    tensor, size = torch.Tensor, (handle.size,)
    if isinstance(handle, HostHandle):
        # With no manager named the reader starts one of its own. As a client of ours it would keep that alive, and with
        # it the files of a trainer that was killed, and its stderr.
        storage = _Call(reductions.rebuild_storage_filename, torch.UntypedStorage, b"", *handle)
        typed = _Call(reductions.rebuild_typed_storage, storage, torch.uint8)
        return _Call(reductions.rebuild_tensor, tensor, typed, (0, size, (1,), False))
    device, where = handle.device, (handle.handle, handle.size, handle.offset)
    view = (tensor, size, (1,), 0, torch.storage.TypedStorage, torch.uint8)
    return _Call(reductions.rebuild_cuda_tensor, *view, device, *where, False, *handle[4:])
