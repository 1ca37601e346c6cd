"""Versions and capabilities of this machine. Starts nothing and imports no engine."""

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
    *("megatron-dppo", "torch", "triton", "megatron-core"),
    *("transformer-engine", "transformer-engine-cu12", "transformer-engine-cu13", "transformer-engine-torch"),
    *("flash-attn", "fla-core", "tilelang", "apex", "nvidia-modelopt", "transformers", "numpy", "psutil"),
)
"""Packages that a training process may import. SGLang and vLLM have separate environments: see servers.py."""

VARIABLES = (
    *("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    *("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"),
    *("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"),
    *("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"),
)
"""Environment variables that affect training. No others are read or printed."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A CUDA device as torch reports it."""

    name: str
    capability: tuple[int, int]
    gib: float
    """Device memory in GiB."""


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """Facts that the table of known-bad combinations reads."""

    python: tuple[int, int, int] = (3, 12, 0)
    system: str = "Linux"
    packages: Mapping[str, str] = field(default_factory=dict)
    """Installed packages, name to version."""
    torch_cuda: str | None = None
    """CUDA version of the torch build. None for a CPU build."""
    driver: str | None = None
    """Version of the NVIDIA driver by nvidia-smi. None without a driver."""
    nccl: str | None = None
    cudnn: str | None = None
    gpus: tuple[Gpu, ...] = ()
    transformer_engine: str = "not installed"
    """``works``, ``not installed``, ``not checked`` (no GPU), or the error of its import."""
    apex: tuple[str, ...] = ()
    """Compiled Apex kernels that Megatron uses."""
    variables: Mapping[str, str] = field(default_factory=dict)
    missing_build_tools: tuple[str, ...] = ()
    """Missing tools for compiling a C++ extension of torch."""
    c_compiler: str | None = "gcc"
    """C compiler that Triton calls. None without one."""


APEX_KERNELS = {"fused_weight_gradient_mlp_cuda": "gradient accumulation", "amp_C": "FusedAdam"}
"""Modules of an Apex built with --cpp_ext and --cuda_ext, and their use in Megatron without Transformer Engine."""


def inspect_machine() -> MachineFacts:
    """Return the facts of this machine."""
    import torch

    from megatron_dppo.mcore.extensions import missing_build_tools

    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    gpus = tuple(Gpu(name=d.name, capability=(d.major, d.minor), gib=d.total_memory / 2**30) for d in devices)
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    compilers = shlex.split(os.environ.get("CC", ""))[:1] or ["gcc", "clang"]
    return MachineFacts(
        python=sys.version_info[:3],
        system=f"{platform.system()} {platform.machine()}",
        packages=_installed_versions(),
        torch_cuda=torch.version.cuda,
        driver=_driver_version(),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        cudnn=None if cudnn is None else str(cudnn),
        gpus=gpus,
        transformer_engine=_check_transformer_engine(has_gpu=bool(gpus)),
        apex=tuple(use for module, use in APEX_KERNELS.items() if importlib.util.find_spec(module) is not None),
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
        missing_build_tools=tuple(missing_build_tools()),
        # That of ``triton.runtime.build``.
        c_compiler=next((name for name in compilers if shutil.which(name)), None),
    )


def _installed_versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _driver_version() -> str | None:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        result = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.split("\n")[0].strip() or None


def _check_transformer_engine(*, has_gpu: bool) -> str:
    if not has_gpu:
        return "not checked: no CUDA device, so its layers are not used"
    from megatron_dppo.errors import UserError
    from megatron_dppo.mcore.transformer_engine import has_transformer_engine

    try:
        return "works" if has_transformer_engine() else "not installed"
    except UserError as error:
        return str(error)


def format_machine(machine: MachineFacts) -> list[str]:
    """Return the facts as lines for the terminal."""
    lines = [f"python {'.'.join(map(str, machine.python))}, {machine.system}"]
    lines += [f"{name} {machine.packages[name]}" for name in PACKAGES if name in machine.packages]
    missing = [name for name in PACKAGES if name not in machine.packages]
    lines.append(f"not installed: {', '.join(missing) or '-'}")
    versions = {
        "driver": machine.driver,
        "CUDA of torch": machine.torch_cuda,
        "NCCL": machine.nccl,
        "cuDNN": machine.cudnn,
    }
    lines.append(", ".join(f"{name} {value or '-'}" for name, value in versions.items()))
    for gpu in dict.fromkeys(machine.gpus):
        capability = ".".join(map(str, gpu.capability))
        count = machine.gpus.count(gpu)
        lines.append(f"{count} x {gpu.name}, compute capability {capability}, {gpu.gib:.0f} GiB")
    if not machine.gpus:
        lines.append("no CUDA device: training runs on the CPU, with gloo")
    lines.append(f"Transformer Engine: {machine.transformer_engine}")
    lines.append(f"Apex kernels that Megatron uses: {', '.join(machine.apex) or 'none'}")
    lines.append(f"C compiler: {machine.c_compiler or '-'}")
    lines.append(f"missing for compiling C++ extensions: {', '.join(machine.missing_build_tools) or 'nothing'}")
    lines += [f"{name}={value}" for name, value in machine.variables.items()]
    return lines
