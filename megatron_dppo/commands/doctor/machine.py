"""Versions and capabilities of this machine; nothing is started, no engine is imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

PACKAGES = (
    "megatron-dppo",
    "torch",
    "triton",
    "megatron-core",
    "transformer-engine",
    "transformer-engine-cu12",
    "transformer-engine-cu13",
    "transformer-engine-torch",
    "flash-attn",
    "apex",
    "nvidia-modelopt",
    "transformers",
    "numpy",
    "psutil",
)
"""What a training process may import. SGLang and vLLM have environments of their own: their servers are asked."""

VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "NVTE_FLASH_ATTN",
    "NVTE_FUSED_ATTN",
    "NVTE_UNFUSED_ATTN",
    "NCCL_P2P_DISABLE",
    "NCCL_IB_DISABLE",
    "NCCL_NVLS_ENABLE",
    "OMP_NUM_THREADS",
)
"""Variables that change what training does here; no other one is looked at or shown."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One CUDA device, as torch sees it."""

    name: str
    capability: tuple[int, int]
    gib: float
    """of its memory"""


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """What the table of known-bad combinations looks at."""

    python: tuple[int, int, int] = (3, 12, 0)
    system: str = "Linux"
    packages: Mapping[str, str] = field(default_factory=dict)
    """name -> version, of what is installed"""
    torch_cuda: str | None = None
    """the CUDA that torch was built for; None = a build for the CPU"""
    driver: str | None = None
    """of NVIDIA, by nvidia-smi; None = there is none"""
    nccl: str | None = None
    cudnn: str | None = None
    gpus: tuple[Gpu, ...] = ()
    engine: str = "not installed"
    """Transformer Engine: ``works``, ``not installed``, ``not looked at`` (no GPU), or why it cannot be imported"""
    apex: tuple[str, ...] = ()
    """of Apex's compiled kernels, those that Megatron takes"""
    variables: Mapping[str, str] = field(default_factory=dict)
    missing_build_tools: tuple[str, ...] = ()
    """Names of what is absent of the tools that compile a C++ extension of torch"""
    c_compiler: str | None = "gcc"
    """C compiler that Triton calls; None if there is none"""


APEX_KERNELS = {"fused_weight_gradient_mlp_cuda": "gradient accumulation", "amp_C": "FusedAdam"}
"""Modules of an Apex that was built with --cpp_ext and --cuda_ext, and what Megatron takes them for: the first one in
its own linear layers, the second where Transformer Engine is not there."""


def look() -> MachineFacts:
    """This machine."""
    import torch

    from megatron_dppo.mcore.compat.extensions import missing_build_tools

    gpus = []
    for i in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(i)
        gpus.append(Gpu(name=found.name, capability=(found.major, found.minor), gib=found.total_memory / 2**30))
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    return MachineFacts(
        python=sys.version_info[:3],
        system=f"{platform.system()} {platform.machine()}",
        packages=_versions(),
        torch_cuda=torch.version.cuda,
        driver=_driver(),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        cudnn=None if cudnn is None else str(cudnn),
        gpus=tuple(gpus),
        engine=_transformer_engine(looked_at=bool(gpus)),
        apex=tuple(use for module, use in APEX_KERNELS.items() if importlib.util.find_spec(module) is not None),
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
        missing_build_tools=tuple(missing_build_tools()),
        c_compiler=_c_compiler(),
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _c_compiler() -> str | None:
    """Return the compiler that ``triton.runtime.build`` takes: CC, gcc or clang."""
    named = os.environ.get("CC")
    candidates = [shlex.split(named)[0]] if named else ["gcc", "clang"]
    return next((name for name in candidates if shutil.which(name)), None)


def _driver() -> str | None:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.split("\n")[0].strip() or None


def _transformer_engine(*, looked_at: bool) -> str:
    if not looked_at:
        return "not looked at: no CUDA device, so its layers are not used"
    from megatron_dppo.errors import UserError
    from megatron_dppo.mcore.compat.transformer_engine import has_transformer_engine

    try:
        return "works" if has_transformer_engine() else "not installed"
    except UserError as error:
        return str(error)


def format_bytes(machine: MachineFacts) -> list[str]:
    """One line a fact."""
    lines = [f"python {'.'.join(map(str, machine.python))}, {machine.system}"]
    lines += [f"{name} {machine.packages.get(name, '-')}" for name in PACKAGES if name in machine.packages]
    absent = [name for name in PACKAGES if name not in machine.packages]
    lines.append(f"not installed: {', '.join(absent) or '-'}")
    versions = {
        "driver": machine.driver,
        "CUDA of torch": machine.torch_cuda,
        "NCCL": machine.nccl,
        "cuDNN": machine.cudnn,
    }
    lines.append(", ".join(f"{name} {value or '-'}" for name, value in versions.items()))
    for count, gpu in _counted(machine.gpus):
        capability = ".".join(map(str, gpu.capability))
        lines.append(f"{count} x {gpu.name}, compute capability {capability}, {gpu.gib:.0f} GiB")
    if not machine.gpus:
        lines.append("no CUDA device: training runs on the CPU, with gloo")
    lines.append(f"Transformer Engine: {machine.engine}")
    lines.append(f"Apex kernels that Megatron takes: {', '.join(machine.apex) or 'none'}")
    lines.append(f"C compiler: {machine.c_compiler or '-'}")
    lines.append(f"missing to compile C++ extensions: {', '.join(machine.missing_build_tools) or 'nothing'}")
    lines += [f"{name}={value}" for name, value in machine.variables.items()]
    return lines


def _counted(gpus: tuple[Gpu, ...]) -> list[tuple[int, Gpu]]:
    return [(gpus.count(gpu), gpu) for gpu in dict.fromkeys(gpus)]
