"""FP8 products of Transformer Engine's linear layers, by Megatron's switches; weights and their copies stay in bf16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.fp8_utils import get_fp8_align_size

from megatron_dppo.errors import ConfigError
from megatron_dppo.platform import Platform

_CAPABILITY = (8, 9)
"""Of the first GPUs with FP8 matrix products: Ada, Hopper."""
_BLACKWELL = (10, 0)


def check_fp8(fields: Mapping[str, Any], dtype: str, platform: Platform, *, transformer_engine: bool) -> None:
    """Whether ``model.transformer.fp8`` can be done here.

    Args:
        fields: ``model.transformer``.
        dtype: ``model.dtype``.
        platform: where training runs.
        transformer_engine: whether its layers are used.

    Raises:
        ConfigError: it cannot, or other keys of FP8 are set without it.
    """
    others = [key for key in fields if key.startswith("fp8_")]
    if not fields.get("fp8"):
        if others:
            raise ConfigError(
                f"model.transformer.{others[0]} = {fields[others[0]]!r} has no effect without model.transformer.fp8 = "
                "'hybrid' or 'e4m3'; set that too, or leave it out"
            )
        return
    name = f"model.transformer.fp8 = {fields['fp8']!r}"
    if dtype != "bf16":
        raise ConfigError(
            f"{name} with model.dtype = {dtype!r}: weights and activations are bf16 beside it; set 'bf16'"
        )
    if not platform.is_cuda or not transformer_engine:
        there = "there is no GPU" if not platform.is_cuda else "Transformer Engine is not installed"
        raise ConfigError(
            f"{name} needs Transformer Engine on a GPU with FP8 (compute capability 8.9 and above: Ada, Hopper, "
            f"Blackwell); here {there}. Leave it out"
        )
    found = torch.cuda.get_device_capability(platform.device)
    needed = _BLACKWELL if fields.get("fp8_recipe") == "mxfp8" else _CAPABILITY
    if found < needed:
        recipe = "" if needed == _CAPABILITY else " with fp8_recipe = 'mxfp8'"
        raise ConfigError(
            f"{name}{recipe} needs a GPU of compute capability {needed[0]}.{needed[1]} or above, this one has "
            f"{found[0]}.{found[1]}. Leave it out"
        )


def row_multiple(fields: Mapping[str, Any]) -> int:
    """What the number of tokens of a product is a multiple of: 1 without FP8."""
    return int(get_fp8_align_size(fields.get("fp8_recipe", "delayed"))) if fields.get("fp8") else 1
