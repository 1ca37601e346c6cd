"""Whether Transformer Engine is there, and what it cannot do."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping

from megatron_dppo.config.optimizer import OptimizerConfig
from megatron_dppo.errors import ConfigError, UserError


def has_transformer_engine() -> bool:
    """Whether Transformer Engine works here; asked on CUDA only.

    By importing it: a package without its part for torch, or one that was built for another torch, is installed all the
    same, and Megatron would take it for a working one until it builds the first layer.

    Raises:
        UserError: it is installed and cannot be imported.
    """
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # its own checks and the loader raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == "transformer_engine":
            return False
        raise UserError(
            f"Transformer Engine is installed but cannot be used ({type(error).__name__}: {error}). Found: "
            f"{_versions()}. It has to be built for this torch and CUDA: pip install --no-build-isolation "
            "'transformer-engine[pytorch]', or remove it with pip uninstall transformer-engine transformer-engine-cu12 "
            "transformer-engine-cu13 transformer-engine-torch to train on plain torch layers"
        ) from error
    return True


def check_attention_support(dtype: str, context_parallel_size: int, *, transformer_engine: bool) -> None:
    """Stop before a model that would be built and then find no attention kernel.

    Args:
        dtype: ``model.dtype``.
        context_parallel_size: of the layout.
        transformer_engine: whether its layers are used.

    Raises:
        ConfigError: fp32 with context parallelism: Transformer Engine's fused kernels take no fp32, and its unfused one
            knows no context parallelism (transformer_engine/pytorch/attention/dot_product_attention/utils.py).
    """
    if transformer_engine and dtype == "fp32" and context_parallel_size > 1:
        raise ConfigError(
            f"model.dtype = 'fp32' with context_parallel_size = {context_parallel_size}: Transformer Engine has no "
            "attention for it (its fused kernels take no fp32, the unfused one no context parallelism). "
            "Use model.dtype = 'bf16', or context_parallel_size = 1"
        )


def check_adam_support(optimizers: Mapping[str, OptimizerConfig]) -> None:
    """Stop before an optimizer that only Transformer Engine has, where it is not used.

    Args:
        optimizers: by the name of their section.

    Raises:
        ConfigError: a precision-aware optimizer on the GPU.
    """
    for name, optimizer in optimizers.items():
        if optimizer.use_precision_aware_optimizer and not optimizer.optimizer_cpu_offload:
            raise ConfigError(
                f"{name}.use_precision_aware_optimizer = true: on the GPU that is Transformer Engine's Adam, and there "
                f"is none here. Install transformer-engine, or set {name}.optimizer_cpu_offload = true"
            )


def accept_missing_te_version() -> None:
    """A shim: without Transformer Engine Megatron's optimizer asks its absent version whether it is new enough."""
    from megatron.core import utils
    from megatron.core.optimizer import optimizer_config

    if utils.get_te_version() is None:
        optimizer_config.is_te_min_version = lambda *version: False


def _versions() -> str:
    import torch

    names = ("transformer-engine", "transformer-engine-cu12", "transformer-engine-cu13", "transformer-engine-torch")
    found = []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    found = found or ["transformer_engine of unknown version"]
    return ", ".join([*found, f"torch {torch.__version__}", f"CUDA {torch.version.cuda or 'none'}"])
