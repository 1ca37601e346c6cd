"""Combinations of versions and settings that are known to fail or to be slow: condition, reason, fix, source."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_dppo.mcore.delta_versions import FIX, miscompiles_delta_rule
from megatron_dppo.mcore.extensions import INSTALL_TOOLS, MODULES
from megatron_dppo.mcore.transformer_engine import install_command, reinstall_command
from megatron_dppo_doctor.doctor.machine import MachineFacts


@dataclass(frozen=True)
class BadCombination:
    """Row of the table of known-bad combinations."""

    observe: Callable[[MachineFacts], str | None]
    """Function that names what this machine has. None if the combination is absent."""
    reason: str
    fix: str
    """``{torch}`` and ``{cuda}`` stand for the version of torch and the major version of its CUDA."""
    source: str
    is_fatal: bool = True
    """True if a run cannot start or computes wrong numbers; False if it is only slower."""


@dataclass(frozen=True)
class CombinationMatch:
    """Row that applies to this machine."""

    observed: str
    combination: BadCombination
    fix: str
    """Fix of the row, with the versions of this machine."""

    def __str__(self) -> str:
        row = self.combination
        kind = "problem" if row.is_fatal else "warning"
        return f"{kind}  {self.observed}: {row.reason}. Fix: {self.fix}. ({row.source})"


def find_bad_combinations(machine: MachineFacts) -> Iterator[CombinationMatch]:
    """Yield the rows of ``TABLE`` that apply to this machine."""
    for combination in TABLE:
        if (observed := combination.observe(machine)) is not None:
            fix = combination.fix.format(
                torch=machine.packages.get("torch", "").partition("+")[0],
                cuda=(machine.torch_cuda or "").partition(".")[0],
            )
            yield CombinationMatch(observed, combination, fix)


def parse_version(version: str) -> tuple[int, ...]:
    """Parse ``2.20.2+cu13`` into ``(2, 20, 2)``. A pre-release counts as its release."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _older(name: str, minimum: tuple[int, ...]) -> Callable[[MachineFacts], str | None]:
    def observe(machine: MachineFacts) -> str | None:
        version = machine.packages.get(name)
        return f"{name} {version}" if version is not None and parse_version(version) < minimum else None

    return observe


def _unsupported_megatron(machine: MachineFacts) -> str | None:
    version = machine.packages.get("megatron-core")
    if version is None:
        return "no megatron-core"
    return None if (0, 16, 1) <= parse_version(version) < (0, 20) else f"megatron-core {version}"


def _old_python(machine: MachineFacts) -> str | None:
    version = machine.packages.get("megatron-core", "0")
    if parse_version(version) >= (0, 17) and machine.python < (3, 12):
        return f"megatron-core {version} with Python {'.'.join(map(str, machine.python))}"
    return None


def _cpu_build_of_torch(machine: MachineFacts) -> str | None:
    if machine.driver is None or machine.torch_cuda is not None:
        return None
    return f"NVIDIA driver {machine.driver} with torch {machine.packages.get('torch')} for the CPU"


def _no_visible_gpu(machine: MachineFacts) -> str | None:
    if machine.driver is None or machine.torch_cuda is None or machine.gpus:
        return None
    return f"NVIDIA driver {machine.driver}, torch for CUDA {machine.torch_cuda}, and no device"


def _broken_transformer_engine(machine: MachineFacts) -> str | None:
    state = machine.transformer_engine
    return None if state.startswith(("works", "not installed", "not checked")) else state


def _transformer_engine_for_other_cuda(machine: MachineFacts) -> str | None:
    if machine.torch_cuda is None:
        return None
    # The wheels name the major version of CUDA that their libraries are built for.
    for major in ("12", "13"):
        if f"transformer-engine-cu{major}" in machine.packages and machine.torch_cuda.split(".")[0] != major:
            return f"transformer-engine-cu{major} with torch for CUDA {machine.torch_cuda}"
    return None


def _attention_variables(machine: MachineFacts) -> str | None:
    if machine.transformer_engine != "works":
        return None
    names = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
    wrong = [f"{name}={machine.variables[name]}" for name in names if machine.variables.get(name, "1") != "1"]
    return ", ".join(wrong) or None


def _max_connections(machine: MachineFacts) -> str | None:
    value = machine.variables.get("CUDA_DEVICE_MAX_CONNECTIONS")
    # Megatron no longer needs the setting on Blackwell, compute capability 10.
    if value == "1" or not machine.gpus or all(gpu.capability >= (10, 0) for gpu in machine.gpus):
        return None
    return f"CUDA_DEVICE_MAX_CONNECTIONS={'(not set)' if value is None else value}"


def _launch_blocking(machine: MachineFacts) -> str | None:
    value = machine.variables.get("CUDA_LAUNCH_BLOCKING", "0")
    return f"CUDA_LAUNCH_BLOCKING={value}" if machine.gpus and value != "0" else None


def _old_gpu(machine: MachineFacts) -> str | None:
    old = [gpu for gpu in machine.gpus if gpu.capability < (8, 0)]
    return f"{old[0].name}, compute capability {'.'.join(map(str, old[0].capability))}" if old else None


def _wrong_delta_kernels(machine: MachineFacts) -> str | None:
    triton = machine.packages.get("triton")
    if triton is None or "fla-core" not in machine.packages:
        return None
    has_tilelang = "tilelang" in machine.packages
    wrong = [g for g in machine.gpus if miscompiles_delta_rule(triton, g.capability, has_tilelang=has_tilelang)]
    return f"fla-core with triton {triton} on {wrong[0].name}" if wrong else None


def _apex_without_kernels(machine: MachineFacts) -> str | None:
    if not machine.gpus or machine.apex or "apex" not in machine.packages:
        return None
    return f"apex {machine.packages['apex']} without compiled kernels"


def _no_build_tools(machine: MachineFacts) -> str | None:
    version = machine.packages.get("megatron-core", "0")
    if parse_version(version) < (0, 17) or not machine.missing_build_tools:
        return None
    return f"megatron-core {version} without {', '.join(machine.missing_build_tools)}"


# Rows: condition, reason, fix, source. A new row needs a case in packages/doctor/tests/test_doctor.py.
TABLE: tuple[BadCombination, ...] = (
    BadCombination(
        _unsupported_megatron,
        "supported versions are 0.16.1 to 0.19",
        "pip install 'megatron-core>=0.16.1,<0.20'",
        "packages/megatron_cpu/src/megatron_dppo_megatron_cpu/shims.py",
    ),
    BadCombination(
        _old_python,
        "this version needs Python 3.12 or newer",
        "use Python 3.12, or megatron-core 0.16.1",
        "Requires-Python of megatron-core",
    ),
    BadCombination(
        lambda machine: None if "psutil" in machine.packages else "no psutil",
        "Megatron's checkpoint writer dies without it, and saving never returns",
        "pip install psutil",
        "setup.py",
    ),
    BadCombination(
        _older("transformers", (4, 56)), "it lacks parts of Qwen3-MoE", "pip install -U transformers", "setup.py"
    ),
    BadCombination(_older("torch", (2, 6)), "at least 2.6 is required", "pip install -U torch", "setup.py"),
    BadCombination(
        _cpu_build_of_torch,
        "training would run on the CPU",
        "pip uninstall -y torch && pip install torch, which is for CUDA on Linux. For a CUDA that this driver has: "
        "https://pytorch.org/get-started/locally",
        "torch.version.cuda",
    ),
    BadCombination(
        _no_visible_gpu,
        "the driver is too old for this CUDA, or CUDA_VISIBLE_DEVICES hides the GPUs",
        "unset CUDA_VISIBLE_DEVICES. If nvidia-smi's CUDA version is older than torch's, update the driver, or pip "
        "uninstall -y torch and install one for that CUDA: https://pytorch.org/get-started/locally",
        "CUDA compatibility, docs.nvidia.com/deploy/cuda-compatibility",
    ),
    BadCombination(
        _broken_transformer_engine,
        "Megatron treats it as working and fails when it builds the first layer",
        "follow the message",
        "megatron_dppo/mcore/transformer_engine.py",
    ),
    BadCombination(
        _transformer_engine_for_other_cuda,
        "its libraries are built for another CUDA version",
        reinstall_command("{cuda}"),
        "Transformer Engine's installation page",
    ),
    BadCombination(
        _attention_variables,
        "with attention_backend = auto Megatron stops unless these are unset or 1",
        "unset them",
        "megatron/core/models/common/language_module",
    ),
    BadCombination(
        _old_gpu,
        "it does not support bf16",
        "use compute capability 8.0 (A100) or newer; model.dtype = 'fp32' is for tests",
        "CUDA C++ programming guide, compute capabilities",
    ),
    BadCombination(
        lambda m: "no C compiler" if m.gpus and "triton" in m.packages and m.c_compiler is None else None,
        "Triton compiles kernel launchers with it, so the first step on the GPU fails",
        "install gcc, or set CC",
        "triton/runtime/build.py",
    ),
    BadCombination(
        _wrong_delta_kernels,
        "the gradient of gated delta nets would be wrong, so a run of Qwen3-Next or Qwen3.5 is refused",
        FIX,
        "flash-linear-attention, issue 640",
        is_fatal=False,
    ),
    BadCombination(
        _no_build_tools,
        f"recompute_modules with {', '.join(MODULES)} compile a C++ extension when a run starts, and fail",
        INSTALL_TOOLS,
        "megatron/core/tensor_parallel/random.py",
        is_fatal=False,
    ),
    BadCombination(
        _older("transformer-engine", (2, 1)),
        "it has no kernels that permute tokens by expert: every layer synchronizes with the device",
        reinstall_command("{cuda}"),
        "megatron/core/transformer/transformer_config.py, moe_permute_fusion",
        is_fatal=False,
    ),
    BadCombination(
        lambda m: "no Transformer Engine" if m.gpus and m.transformer_engine == "not installed" else None,
        "the model uses Megatron's torch layers, which are slower",
        install_command("{cuda}"),
        "megatron_dppo/mcore/fusions.py",
        is_fatal=False,
    ),
    BadCombination(
        lambda machine: "no triton" if machine.gpus and "triton" not in machine.packages else None,
        "the head runs in plain torch, several times slower",
        # A bare "triton" is the newest one, which this torch may not be built for.
        "pip install 'torch=={torch}', which leaves torch and brings its Triton",
        "megatron_dppo/head/row_kernels.py",
        is_fatal=False,
    ),
    BadCombination(
        _max_connections,
        "before Blackwell, Megatron needs 1 to overlap communication with GEMMs under tensor parallelism",
        "export CUDA_DEVICE_MAX_CONNECTIONS=1 (launch/*.sh set it)",
        "megatron/core/tensor_parallel/layers.py",
        is_fatal=False,
    ),
    BadCombination(
        _apex_without_kernels,
        "Megatron cannot use it; the PyPI package of that name is another project",
        "build github.com/NVIDIA/apex with --cpp_ext and --cuda_ext, or remove it",
        "megatron/core/tensor_parallel/layers.py",
        is_fatal=False,
    ),
    BadCombination(
        _launch_blocking,
        "every kernel launch blocks",
        "unset it, except to debug a CUDA error",
        "CUDA C++ programming guide, environment variables",
        is_fatal=False,
    ),
)
