"""Memory that this process shares with others without a copy: by CUDA IPC on GPUs, as POSIX shared memory on hosts.

A handle locates the bytes with the fields that ``torch.multiprocessing`` uses. Both sides need a torch version with the
same fields: 2.5 or later on GPUs.
"""

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
    """A file of shared memory. Torch's manager process removes it if this process is killed."""

    name: bytes
    size: int
    """Size in bytes."""


class DeviceHandle(NamedTuple):
    """Part of one GPU allocation, with the fields of ``rebuild_cuda_tensor``."""

    device: str
    """UUID of the GPU: device numbers differ between processes."""
    handle: bytes
    size: int
    """Size in bytes."""
    offset: int
    """Offset from the start of the allocation in bytes."""
    counter: bytes
    """Shared counter that the one reader decrements when it has finished."""
    counter_offset: int
    event: bytes
    """CUDA event after which the bytes are valid."""
    event_sync: bool


Handle = HostHandle | DeviceHandle


class SharedBucket:
    """Bytes that other processes may read until ``free``; ``RuntimeError`` if this memory cannot be shared.

    The data, uint8 [num_bytes], fills its whole storage and is not written any more. ``readers`` processes open it on a
    CPU; on a GPU it is one.
    """

    def __init__(self, data: Tensor, readers: int) -> None:
        self._data: Tensor | None = data
        storage = data.untyped_storage()
        self.handle: Handle
        if data.device.type == "cuda":
            # The first value is the device number in this process, which the UUID replaces.
            _, handle, size, offset, *counter_and_event = storage._share_cuda_()
            uuid = str(torch.cuda.get_device_properties(data.device).uuid)
            self.handle = DeviceHandle(uuid, handle, size, offset, *counter_and_event)
            return
        # The first value names torch's manager process, which readers must not use (see ``_pickled_tensor``).
        _, *name_and_size = storage._share_filename_cpu_()
        self.handle = HostHandle(*name_and_size)
        # One count per reader, and one more so that no reader counts down to 0. Torch would then remove the file, and a
        # process that finds no file to remove is ended by torch.
        for _ in range(readers + 1):
            storage._shared_incref()

    def free(self, *, taken: bool) -> None:
        """Release the memory; with ``taken`` the reader has finished.

        On a GPU torch keeps the memory until the reader has reported so, which never happens if it died before. Without
        ``taken`` this process reports it.
        """
        handle = self.handle
        if isinstance(handle, HostHandle):
            (_SHARED_MEMORY / handle.name.decode().lstrip("/")).unlink(missing_ok=True)
        elif not taken:
            torch.UntypedStorage._release_ipc_counter_cuda(handle.counter, handle.counter_offset)
        self._data = None
        if isinstance(handle, DeviceHandle):
            # Torch reuses memory that readers have finished with only after this call.
            torch.cuda.ipc_collect()


def as_json(handle: Handle) -> dict[str, str | int | bool]:
    """Return the fields of a handle, with bytes as base64."""
    fields = handle._asdict().items()
    return {name: base64.b64encode(value).decode() if isinstance(value, bytes) else value for name, value in fields}


class _PickledCall:
    """Object that becomes ``function(*args)`` when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._reduced = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._reduced


def as_flattened_bucket(
    handle: Handle, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> bytes:
    """Return the pickle that SGLang accepts as a ``flattened_bucket``, with names that its unpickler allows only.

    SGLang reads the metadata of the tensors as attributes of any class (``_update_weights_from_flattened_bucket``). It
    replaces the device of a GPU tensor, a UUID, by its own device number (``utils/patch_torch.py``).
    """
    metadata = []
    start = 0
    for name, dtype_name, shape in zip(names, dtypes, shapes, strict=True):
        dtype = getattr(torch, dtype_name)
        size = math.prod(shape) * dtype.itemsize
        # The bucket is a tensor of bytes, so SGLang's element counts and indices are bytes.
        fields = {"name": name, "shape": tuple(shape), "dtype": dtype, "numel": size}
        metadata.append(SimpleNamespace(**fields, start_idx=start, end_idx=start + size))
        start += size
    return pickle.dumps({"flattened_tensor": _pickled_tensor(handle), "metadata": metadata})


def _pickled_tensor(handle: Handle) -> _PickledCall:
    """Return what ``ForkingPickler`` would write for the tensor of bytes."""
    tensor = torch.Tensor
    size = (handle.size,)
    if isinstance(handle, HostHandle):
        # With an empty manager name, the reader starts a manager of its own. As a client of ours it would keep that one
        # alive, and with it the files and the stderr of a trainer that was killed.
        storage = _PickledCall(reductions.rebuild_storage_filename, torch.UntypedStorage, b"", *handle)
        typed = _PickledCall(reductions.rebuild_typed_storage, storage, torch.uint8)
        return _PickledCall(reductions.rebuild_tensor, tensor, typed, (0, size, (1,), False))
    view = (tensor, size, (1,), 0, torch.storage.TypedStorage, torch.uint8)
    allocation = (handle.device, handle.handle, handle.size, handle.offset)
    requires_grad = False
    return _PickledCall(reductions.rebuild_cuda_tensor, *view, *allocation, requires_grad, *handle[4:])
