"""The server of ``check_sharing``: prints how many numbers in the trainer's memory are not what they should be."""

from __future__ import annotations

import base64
import json
import pickle
import sys
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from megatron_dppo_engines.serving import VLLM_EXTENSION

EXTENSION = VLLM_EXTENSION


def main() -> None:
    given = json.load(sys.stdin)
    data = as_sglang(given["pickled"]) if given["engine"] == "sglang" else as_vllm(given["fields"], given["cuda"])
    full, half = data.split([4 << 21, 2 << 22])
    wrong = (full.view(torch.float32) != torch.arange(1 << 21, device=data.device).float()).sum()
    wrong += (half.view(torch.bfloat16) != torch.arange(1 << 22, device=data.device).to(torch.bfloat16)).sum()
    print(int(wrong), flush=True)


def as_sglang(pickled: str) -> Tensor:
    """With what SGLang puts in place of torch's function (``utils/patch_torch.py``): the device comes as its UUID."""
    original = reductions.rebuild_cuda_tensor

    def of_uuid(*arguments: Any) -> Tensor:
        names = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
        return original(*arguments[:6], names.index(arguments[6]), *arguments[7:])

    reductions.rebuild_cuda_tensor = of_uuid
    return pickle.loads(base64.b64decode(pickled))["flattened_tensor"]


def as_vllm(fields: dict[str, Any], cuda: bool) -> Tensor:
    """With the worker extension."""
    sys.path.insert(0, str(EXTENSION))
    from megatron_dppo_memory import copy_from_handle

    return copy_from_handle(fields, torch.device("cuda", 0) if cuda else torch.device("cpu"))


if __name__ == "__main__":
    main()
