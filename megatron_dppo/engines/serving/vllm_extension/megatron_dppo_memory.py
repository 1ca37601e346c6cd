"""Memory of the trainer that a vLLM worker opens where it is; runs inside vLLM.

The handle comes as plain fields (``megatron_dppo/rollout/handles.py``) and is opened by torch's own functions; nothing
is unpickled.
"""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor


def copied(handle: dict[str, Any], device: torch.device) -> Tensor:
    """[bytes] uint8: a copy, since vLLM keeps parts of it until a layer is complete, and the trainer's memory is given
    back with the answer: torch waits for the copy when it lets the memory go.

    Raises:
        ValueError: the memory is that of another device.
        RuntimeError: it is not there.
    """
    own = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    if handle.get("device") != own:
        raise ValueError(
            f"the trainer's memory is on {_named(handle.get('device'))}, this worker on {_named(own)}: servers and "
            "trainer need the same GPUs in the same order (CUDA_VISIBLE_DEVICES)"
        )
    return (_of_host(handle) if own is None else _of_device(handle, device)).clone()


def _named(uuid: str | None) -> str:
    return "the CPU" if uuid is None else f"the GPU {uuid}"


def _of_host(handle: dict[str, Any]) -> Tensor:
    # No manager is named: a client of the trainer's would keep that alive, and its files.
    storage = torch.UntypedStorage._new_shared_filename_cpu(b"", _bytes(handle["name"]), handle["size"])
    return torch.empty(0, dtype=torch.uint8).set_(storage._shared_decref())


def _of_device(handle: dict[str, Any], device: torch.device) -> Tensor:
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
