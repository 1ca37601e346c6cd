"""Transformer Engine's real Python with a stand-in for its compiled extension, on a machine without CUDA."""

from __future__ import annotations

import contextlib
import enum
import importlib.machinery
import os
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch.overrides import TorchFunctionMode

META = torch.device("meta")


class _Extension(types.ModuleType):
    """Has every function, and none of them does anything."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=name)
        setattr(self, name, value)
        return value


def stub_transformer_engine(folder: Path) -> None:
    """Make ``import transformer_engine.pytorch`` take the sources in ``folder``, the unpacked wheel."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # its own switch: do not look for the compiled library
    sys.path.insert(0, str(folder))
    extension = _Extension("transformer_engine_torch")
    # What the sources subclass or take as numbers while they are imported.
    extension.DType = enum.IntEnum(
        "DType",
        {"kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6}
        | {"kFloat8E4M3": 7, "kFloat8E5M2": 8, "kFloat4E2M1": 10},
    )
    extension.NVTE_Fused_Attn_Backend = enum.IntEnum(
        "NVTE_Fused_Attn_Backend", {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
    )
    base = type("Base", (), {})
    for name in ("CommOverlap", "CommOverlapP2P", "CommOverlapBase", "CommOverlapHelper"):
        setattr(extension, name, type(name, (base,), {}))
    for name in ("Float8BlockScaleTensorFormat", "FP8TensorMeta"):
        setattr(extension, name, type(name, (base,), {}))
    extension.get_cublasLt_version = lambda: 130000
    extension.get_cudnn_version = lambda: 91400
    extension.get_num_cublas_streams = lambda: 4
    sys.modules["transformer_engine_torch"] = extension
    package = types.ModuleType("transformer_engine")
    package.__path__ = [f"{folder}/transformer_engine"]
    package.__spec__ = importlib.machinery.PathFinder.find_spec("transformer_engine", [str(folder)])
    package.__file__ = f"{folder}/transformer_engine/__init__.py"
    sys.modules["transformer_engine"] = package
    import transformer_engine.common as common

    common.load_framework_extension = lambda framework: None
    sys.modules["transformer_engine.pytorch.onnx_extensions"] = _Extension("onnx_extensions")
    import transformer_engine.pytorch as pytorch

    package.common, package.pytorch = common, pytorch
    (result,) = folder.glob("transformer_engine-*.dist-info")
    package.__version__ = result.name.removesuffix(".dist-info").split("-")[1]


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *a, **k: None


def pretend_cuda() -> None:
    """``torch.cuda`` of one H100 on which nothing happens."""
    cuda: Any = torch.cuda
    properties = types.SimpleNamespace(
        major=9, minor=0, multi_processor_count=132, name="fake", total_memory=80 << 30, warp_size=32, gcnArchName=""
    )
    state = torch.zeros(16, dtype=torch.uint8)
    answers: dict[str, Any] = dict(
        is_available=True,
        current_device=0,
        device_count=1,
        get_device_capability=(9, 0),
        get_device_properties=properties,
        get_device_name="fake",
        get_rng_state=state,
        initial_seed=0,
        memory_allocated=0,
        max_memory_allocated=0,
        current_stream=_Stream(),
        default_stream=_Stream(),
    )
    for name, value in answers.items():
        setattr(cuda, name, lambda *a, value=value, **k: value)
    nothing = ("synchronize", "empty_cache", "set_device", "set_rng_state", "manual_seed", "manual_seed_all")
    for name in (*nothing, "_lazy_init", "_lazy_call"):
        setattr(cuda, name, lambda *a, **k: None)
    for name in ("stream", "device"):
        setattr(cuda, name, lambda *a: contextlib.nullcontext())
    cuda.Stream = cuda.Event = _Stream
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *a: None


def _is_cuda(device: Any) -> bool:
    if device is None or isinstance(device, torch.dtype | torch.Tensor | bool):
        return False
    return isinstance(device, int) or torch.device(device).type == "cuda"


class CudaIsMeta(TorchFunctionMode):
    """Tensors that are made on or moved to CUDA come on ``meta``."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if function is torch.device:
            return META if _is_cuda(args[0]) else function(*args, **kwargs)
        if name == "cuda":
            return args[0].to(META)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = META
        if name == "to":
            args = (args[0], *(META if _is_cuda(a) else a for a in args[1:]))
        return function(*args, **kwargs)
