"""Combinations of versions and settings that are known not to work, or not well: when, why, what to do, says who."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_dppo.commands.doctor.machine import MachineFacts
from megatron_dppo.mcore.compat.extensions import INSTALL_TOOLS, MODULES


@dataclass(frozen=True)
class Combination:
    """One row of the table."""

    found: Callable[[MachineFacts], str | None]
    """what of it is here, in words; None = it is not"""
    why: str
    fix: str
    source: str
    stops: bool = True
    """whether a run cannot start or would be wrong; False = it is only slower"""


@dataclass(frozen=True)
class CombinationMatch:
    """A row that holds here."""

    here: str
    row: Combination

    def __str__(self) -> str:
        kind = "problem" if self.row.stops else "warning"
        return f"{kind}  {self.here}: {self.row.why}. {self.row.fix} ({self.row.source})"


def known_bad(machine: MachineFacts) -> Iterator[CombinationMatch]:
    """The rows of ``TABLE`` that hold for this machine."""
    for row in TABLE:
        if (here := row.found(machine)) is not None:
            yield CombinationMatch(here, row)


def numbers(version: str) -> tuple[int, ...]:
    """``2.20.2+cu13`` to ``(2, 20, 2)``; a pre-release counts as its release."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _older(name: str, than: tuple[int, ...]) -> Callable[[MachineFacts], str | None]:
    def found(machine: MachineFacts) -> str | None:
        version = machine.packages.get(name)
        return f"{name} {version}" if version is not None and numbers(version) < than else None

    return found


def _missing(name: str) -> Callable[[MachineFacts], str | None]:
    return lambda machine: None if name in machine.packages else f"no {name}"


def _megatron(machine: MachineFacts) -> str | None:
    version = machine.packages.get("megatron-core")
    if version is None:
        return "no megatron-core"
    return None if (0, 16, 1) <= numbers(version) < (0, 20) else f"megatron-core {version}"


def _python(machine: MachineFacts) -> str | None:
    version = machine.packages.get("megatron-core", "0")
    if numbers(version) >= (0, 17) and machine.python < (3, 12):
        return f"megatron-core {version} with Python {'.'.join(map(str, machine.python))}"
    return None


def _cpu_build(machine: MachineFacts) -> str | None:
    if machine.driver is None or machine.torch_cuda is not None:
        return None
    return f"NVIDIA driver {machine.driver} with torch {machine.packages.get('torch')} for the CPU"


def _no_device(machine: MachineFacts) -> str | None:
    if machine.driver is None or machine.torch_cuda is None or machine.gpus:
        return None
    return f"NVIDIA driver {machine.driver}, torch for CUDA {machine.torch_cuda}, and no device"


def _engine_broken(machine: MachineFacts) -> str | None:
    usual = machine.engine == "works" or machine.engine.startswith(("not installed", "not looked at"))
    return None if usual else machine.engine


def _engine_cuda(machine: MachineFacts) -> str | None:
    if machine.torch_cuda is None:
        return None
    for major in ("12", "13"):
        if f"transformer-engine-cu{major}" in machine.packages and machine.torch_cuda.split(".")[0] != major:
            return f"transformer-engine-cu{major} with torch for CUDA {machine.torch_cuda}"
    return None


def _no_engine(machine: MachineFacts) -> str | None:
    return "no Transformer Engine" if machine.gpus and machine.engine == "not installed" else None


def _attention_switch(machine: MachineFacts) -> str | None:
    if machine.engine != "works":
        return None
    names = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
    wrong = [f"{name}={machine.variables[name]}" for name in names if machine.variables.get(name, "1") != "1"]
    return ", ".join(wrong) or None


def _connections(machine: MachineFacts) -> str | None:
    value = machine.variables.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if value == "1" or not machine.gpus or all(gpu.capability >= (10, 0) for gpu in machine.gpus):
        return None
    return f"CUDA_DEVICE_MAX_CONNECTIONS={'(not set)' if value is None else value}"


def _blocking(machine: MachineFacts) -> str | None:
    value = machine.variables.get("CUDA_LAUNCH_BLOCKING", "0")
    return f"CUDA_LAUNCH_BLOCKING={value}" if machine.gpus and value != "0" else None


def _old_gpu(machine: MachineFacts) -> str | None:
    old = [gpu for gpu in machine.gpus if gpu.capability < (8, 0)]
    return f"{old[0].name}, compute capability {'.'.join(map(str, old[0].capability))}" if old else None


def _no_triton(machine: MachineFacts) -> str | None:
    return "no triton" if machine.gpus and "triton" not in machine.packages else None


def _apex_without_kernels(machine: MachineFacts) -> str | None:
    if not machine.gpus or machine.apex or "apex" not in machine.packages:
        return None
    return f"apex {machine.packages['apex']} without compiled kernels"


def _no_c_compiler(machine: MachineFacts) -> str | None:
    needs_one = bool(machine.gpus) and "triton" in machine.packages
    return "no C compiler" if needs_one and machine.c_compiler is None else None


def _no_build_tools(machine: MachineFacts) -> str | None:
    version = machine.packages.get("megatron-core", "0")
    if numbers(version) < (0, 17) or not machine.missing_build_tools:
        return None
    return f"megatron-core {version} without {', '.join(machine.missing_build_tools)}"


_INSTALL_ENGINE = "pip install --no-build-isolation 'transformer-engine[pytorch]'"

TABLE: tuple[Combination, ...] = (
    Combination(
        _megatron,
        "the versions that are supported are 0.16.1 to 0.19",
        "pip install 'megatron-core>=0.16.1,<0.20'",
        "megatron_dppo/mcore/compat/shims.py",
    ),
    Combination(
        _python,
        "it is made for Python 3.12 and newer",
        "Use Python 3.12, or megatron-core 0.16.1",
        "Requires-Python of megatron-core",
    ),
    Combination(
        _missing("psutil"),
        "Megatron's checkpoints wait for ever: the process that writes dies without it",
        "pip install psutil",
        "setup.py",
    ),
    Combination(
        _older("transformers", (4, 56)), "Qwen3-MoE is not as it should be", "pip install -U transformers", "setup.py"
    ),
    Combination(_older("torch", (2, 6)), "too old", "pip install -U torch", "setup.py"),
    Combination(
        _cpu_build,
        "training would run on the CPU",
        "Install torch for CUDA: https://pytorch.org/get-started/locally",
        "torch.version.cuda",
    ),
    Combination(
        _no_device,
        "the driver is too old for this CUDA, or CUDA_VISIBLE_DEVICES hides the GPUs",
        "Compare nvidia-smi's CUDA version with torch's; unset CUDA_VISIBLE_DEVICES",
        "CUDA compatibility, docs.nvidia.com/deploy/cuda-compatibility",
    ),
    Combination(
        _engine_broken,
        "Megatron would take it for a working one until the first layer is built",
        "Follow the message",
        "megatron_dppo/mcore/compat/transformer_engine.py",
    ),
    Combination(
        _engine_cuda,
        "its libraries are those of another CUDA",
        f"pip uninstall it, then {_INSTALL_ENGINE}",
        "Transformer Engine's installation page",
    ),
    Combination(
        _attention_switch,
        "with attention_backend = auto Megatron stops unless these are unset or 1",
        "Unset them",
        "megatron/core/models/common/language_module",
    ),
    Combination(
        _old_gpu,
        "it has no bf16",
        "Use compute capability 8.0 (A100) or newer; model.dtype = 'fp32' is for tests",
        "CUDA C++ programming guide, compute capabilities",
    ),
    Combination(
        _no_c_compiler,
        "Triton compiles the launcher of every kernel with it, so the first step on the GPU fails",
        "Install gcc (on Debian: gcc), or set CC",
        "triton/runtime/build.py",
    ),
    Combination(
        _no_build_tools,
        f"recompute_modules with {', '.join(MODULES)} compile a C++ extension at the start of a run, and fail there",
        INSTALL_TOOLS,
        "megatron/core/tensor_parallel/random.py",
        stops=False,
    ),
    Combination(
        _older("transformer-engine", (2, 1)),
        "it has no kernels that sort tokens by expert: every layer waits for the device",
        f"Newer: {_INSTALL_ENGINE}",
        "megatron/core/transformer/transformer_config.py, moe_permute_fusion",
        stops=False,
    ),
    Combination(
        _no_engine,
        "the model runs on plain torch layers, slower",
        _INSTALL_ENGINE,
        "megatron_dppo/mcore/fusions.py",
        stops=False,
    ),
    Combination(
        _no_triton,
        "the head's passes over the vocabulary run in plain torch, several times slower",
        "pip install triton",
        "megatron_dppo/head/row_kernels.py",
        stops=False,
    ),
    Combination(
        _connections,
        "before Blackwell Megatron orders communication and GEMMs by 1 under tensor parallelism",
        "export CUDA_DEVICE_MAX_CONNECTIONS=1 (launch/*.sh set it)",
        "megatron/core/tensor_parallel/layers.py",
        stops=False,
    ),
    Combination(
        _apex_without_kernels,
        "Megatron takes nothing from it; PyPI's package of that name is another program",
        "Build github.com/NVIDIA/apex with --cpp_ext and --cuda_ext, or remove it",
        "megatron/core/tensor_parallel/layers.py",
        stops=False,
    ),
    Combination(
        _blocking,
        "every kernel is waited for",
        "Unset it, unless you look for the place of an error",
        "CUDA C++ programming guide, environment variables",
        stops=False,
    ),
)
