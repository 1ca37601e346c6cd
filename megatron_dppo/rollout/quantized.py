"""Fake quantisation of the local engine's weights, by nvidia-modelopt's own quantizers."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from megatron_dppo.errors import ConfigError
from megatron_dppo.hf import is_fused_experts

CONFIGS = {"fp8": "FP8_DEFAULT_CFG", "int8": "INT8_WEIGHT_ONLY_CFG", "int4": "INT4_BLOCKWISE_WEIGHT_ONLY_CFG"}
"""``rollout.perturbation.weights`` -> modelopt's configuration, whose weight quantizer is used: FP8 E4M3 with a scale a
tensor, INT8 with one an output channel, INT4 with one for 128 inputs of a channel."""
_LEFT_OUT = ("embed_tokens", "lm_head", "mlp.gate.", "shared_expert_gate")
"""Parts of the names that modelopt's configurations leave out: embedding, output layer, routers."""


class WeightQuantizer:
    """Rounds the weights of a model to a coarse type, and keeps them in the model's own.

    Args:
        form: a key of ``CONFIGS``.

    Raises:
        ConfigError: nvidia-modelopt is not installed.
    """

    def __init__(self, form: str) -> None:
        quantization = _modelopt(form)
        entries = getattr(quantization, CONFIGS[form])["quant_cfg"]
        (settings,) = (entry["cfg"] for entry in entries if entry["quantizer_name"] == "*weight_quantizer")
        self._attributes = import_module(f"{quantization.__name__}.config").QuantizerAttributeConfig(**settings)
        self._quantizer = import_module(f"{quantization.__name__}.nn").TensorQuantizer

    @torch.no_grad()
    def apply(self, model: nn.Module) -> None:
        """Round all linear weights of ``model`` in place, those of each expert for itself; scales are those of the
        weights as they are now."""
        for weight in quantized_weights(model):
            weight.copy_(self._rounded(weight))

    def _rounded(self, weight: Tensor) -> Tensor:
        quantizer = self._quantizer(self._attributes).to(weight.device)
        quantizer.disable_quant()
        quantizer.enable_calib()
        quantizer(weight)
        quantizer.load_calib_amax()
        quantizer.disable_calib()
        quantizer.enable_quant()
        return quantizer(weight)


def quantized_weights(model: nn.Module) -> Iterator[Tensor]:
    """The matrices that are rounded, each ``[out, in]``."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in _LEFT_OUT):
            continue
        if is_fused_experts(name):
            yield from parameter
        elif parameter.dim() == 2:
            yield parameter


def preload_modelopt() -> None:
    """Import nvidia-modelopt, where it is installed, before processes are forked: it takes each eleven seconds."""
    if find_spec("modelopt") is not None:
        import_module("modelopt.torch.quantization")


def require_modelopt(form: str) -> None:
    """Refuse coarse weights where nvidia-modelopt is not installed, without importing it.

    Raises:
        ConfigError: with how to install it.
    """
    if find_spec("modelopt") is None:
        raise ConfigError(_missing(form, "not installed"))


def _modelopt(form: str) -> Any:
    try:
        return import_module("modelopt.torch.quantization")
    except ImportError as error:
        raise ConfigError(_missing(form, f"cannot be imported: {error}")) from error


def _missing(form: str, why: str) -> str:
    return (
        f"rollout.perturbation.weights = {form!r} rounds with nvidia-modelopt ({why}); install it with pip install "
        "'megatron-dppo[modelopt]', or set weights = 'none'"
    )
