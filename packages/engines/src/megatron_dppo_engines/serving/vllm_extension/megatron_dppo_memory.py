"""Access of a vLLM worker to memory of the trainer; runs inside vLLM.

The handle arrives as plain fields (``megatron_dppo_engines.shared_memory``) and is opened by torch's own functions.
Nothing is unpickled.
"""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor


def copy_from_handle(handle: dict[str, Any], device: torch.device) -> Tensor:
    """Return a copy of the trainer's memory, uint8 [bytes].

    A copy, since vLLM keeps parts of it until a layer is complete, and the trainer's memory is released with the
    response. Torch waits for the copy when it releases the memory.
    """
    worker_uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    if handle.get("device") != worker_uuid:
        raise ValueError(
            f"the trainer's memory is on {_device_name(handle.get('device'))}, this worker on "
            f"{_device_name(worker_uuid)}: servers and trainer need the same GPUs in the same order "
            "(CUDA_VISIBLE_DEVICES)"
        )
    return (_open_on_host(handle) if worker_uuid is None else _open_on_device(handle, device)).clone()


def _device_name(uuid: str | None) -> str:
    return "the CPU" if uuid is None else f"the GPU {uuid}"


def _open_on_host(handle: dict[str, Any]) -> Tensor:
    # No manager is named: a client of the trainer's manager would keep it and its files alive.
    storage = torch.UntypedStorage._new_shared_filename_cpu(b"", _bytes(handle["name"]), handle["size"])
    return torch.empty(0, dtype=torch.uint8).set_(storage._shared_decref())


def _open_on_device(handle: dict[str, Any], device: torch.device) -> Tensor:
    return rebuild_cuda_tensor(
        torch.Tensor,
        (handle["size"],),
        (1,),
        0,
        torch.storage.TypedStorage,
        torch.uint8,
        device.index,
        _bytes(handle["handle"]),
        handle["size"],
        handle["offset"],
        False,
        _bytes(handle["counter"]),
        handle["counter_offset"],
        _bytes(handle["event"]),
        handle["event_sync"],
    )


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
