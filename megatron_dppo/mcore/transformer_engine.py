"""Detection of Transformer Engine, and checks of its limits."""

import importlib
import importlib.metadata
import re
from typing import Any

from torch.nn import Module

from megatron_dppo.config.optimizer import OptimizerConfig
from megatron_dppo.errors import ConfigError, UserError

_DISTRIBUTIONS = (
    "transformer-engine",
    "transformer-engine-cu12",
    "transformer-engine-cu13",
    "transformer-engine-torch",
)
"""Distributions of Transformer Engine: the package, its libraries by CUDA version, and what is built for one torch."""
_REMOVE = f"pip uninstall -y {' '.join(_DISTRIBUTIONS)}"


def install_command(cuda: str | None = None) -> str:
    """Return the command that installs Transformer Engine for a major version of CUDA; None: that of torch."""
    if cuda is None:
        import torch

        cuda = (torch.version.cuda or "").partition(".")[0]
    # Without the version the package takes the libraries of its own default. pip before 23.3 ignores "core_cu13".
    extras = f"core-cu{cuda},pytorch" if cuda else "pytorch"
    return f"pip install --no-build-isolation 'transformer-engine[{extras}]'"


def reinstall_command(cuda: str | None = None) -> str:
    """Return the command that replaces a Transformer Engine that does not fit, also one of the newest version."""
    # The cache holds the part that pip built for the torch of that time.
    return f"{_REMOVE} && {install_command(cuda)} --no-cache-dir"


def has_transformer_engine() -> bool:
    """Return True if Transformer Engine works; called on CUDA only.

    It is imported, because an installation can lack its torch part or be built for another torch (a UserError).
    Megatron would notice only when it builds the first layer.
    """
    try:
        importlib.import_module("transformer_engine.pytorch")
    # Its checks and the dynamic loader can raise any exception.
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "transformer_engine":
            return False
        raise UserError(
            f"Transformer Engine is installed but cannot be used ({type(error).__name__}: {error}). Found: "
            f"{_versions()}. It must be built for this torch and CUDA. Fix: {reinstall_command()}. Or train on "
            f"plain torch layers: {_REMOVE}"
        ) from error
    return True


def check_attention_support(
    dtype: str,
    context_parallel_size: int,
    *,
    transformer_engine: bool,
    windows: bool = False,
    cp_comm_type: Any = None,
) -> None:
    """Check that Transformer Engine has an attention kernel for this model.

    fp32 does not go with context parallelism: its fused kernels do not support fp32, and its unfused one no context
    parallelism. Neither do ``windows`` (or sinks) with another exchange than all-to-all over heads
    (transformer_engine/pytorch/attention/dot_product_attention/utils.py, context_parallel.py).
    """
    if transformer_engine and dtype == "fp32" and context_parallel_size > 1:
        raise ConfigError(
            f"model.dtype = 'fp32' with context_parallel_size = {context_parallel_size}: Transformer Engine has no "
            "attention for it (its fused kernels take no fp32, the unfused one no context parallelism). "
            "Use model.dtype = 'bf16', or context_parallel_size = 1"
        )
    if transformer_engine and windows and context_parallel_size > 1 and cp_comm_type != "a2a":
        raise ConfigError(
            f"context_parallel_size = {context_parallel_size} and model.transformer.cp_comm_type = {cp_comm_type!r} "
            "with a model that has sliding windows or attention sinks: Transformer Engine computes them only with an "
            "all-to-all over heads. Set model.transformer.cp_comm_type = 'a2a', or context_parallel_size = 1"
        )


_SPLIT = re.compile(r"\.softmax_offset$|\.experts\.linear_fc[12]\.(weight|bias)\d+$")
"""Attention sinks, and experts, whose biases have no tensor parallelism: each rank counts its own."""
_REPLICATED = re.compile(r"\.linear_(q|kv)_down_proj\.weight$")
"""Down projections of latent attention: each tensor-parallel rank has all of them."""


def correct_tensor_parallel_marks(model: Module) -> None:
    """Mark parameters as split over tensor parallelism, or as replicated, where Megatron's marks are wrong.

    Reason: the gradient norm counts a marked parameter on each tensor-parallel rank, any other on the first rank
        alone. With Transformer Engine's layers attention sinks and experts have no mark, and the replicated down
        projections of latent attention have one.
    Affected: Megatron Core 0.16.1 (experts with Transformer Engine 2.20.2); sinks to 0.19.2.
    Delete when: Megatron marks them right.
    """
    for name, parameter in model.named_parameters():
        is_replicated = _REPLICATED.search(name) is not None
        if is_replicated or _SPLIT.search(name):
            parameter.tensor_model_parallel = not is_replicated  # type: ignore[attr-defined]


def check_adam_support(optimizer: OptimizerConfig) -> None:
    """Check, without Transformer Engine, that the optimizer does not need its Adam."""
    if optimizer.use_precision_aware_optimizer and not optimizer.optimizer_cpu_offload:
        raise ConfigError(
            "optimizer.use_precision_aware_optimizer = true: on the GPU that is Transformer Engine's Adam, and there "
            "is none here. Install transformer-engine, or set optimizer.optimizer_cpu_offload = true"
        )


def _versions() -> str:
    import torch

    versions = []
    for name in _DISTRIBUTIONS:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    versions = versions or ["transformer_engine of unknown version"]
    return ", ".join([*versions, f"torch {torch.__version__}", f"CUDA {torch.version.cuda or 'none'}"])
