"""Perturbations of the local engine: fake quantization by nvidia-modelopt, router noise, hidden filters."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from megatron_dppo.errors import ConfigError
from megatron_dppo.hf.folder import is_fused_experts
from megatron_dppo.types import RoutingShape

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


@dataclass(frozen=True)
class Perturbation:
    """What is done to the engine; the defaults do nothing. Keys as in ``[rollout.perturbation]``."""

    weights: str = "none"
    router_noise: float = 0.0
    unrecorded_top_p: float = 1.0


class PerturbedModel:
    """A transformers model with coarse weights and noisy routers.

    Args:
        model: is changed in place.
        perturbation: how.
        routing: sizes of its routes; None = a dense model.

    Raises:
        ConfigError: the weights are to be rounded, and nvidia-modelopt is not installed.
        ValueError: noise for the routers of a dense model.
    """

    def __init__(self, model: Any, perturbation: Perturbation, routing: RoutingShape | None) -> None:
        self._model, self._noise = model, perturbation.router_noise
        self._quantizer = None if perturbation.weights == "none" else WeightQuantizer(perturbation.weights)
        self._generator: torch.Generator | None = None
        if not self._noise:
            return
        if routing is None:
            raise ValueError(f"router_noise = {self._noise} for a dense model, which has no routers")
        for index, layer in enumerate(model.model.layers):
            if index not in routing.dense_layers:
                # Before the hooks of a RouteRecorder, which thus sees the choices that are made.
                layer.mlp.gate.register_forward_hook(self._reroute)

    def weights_changed(self) -> None:
        """Round the weights that were copied into the model."""
        if self._quantizer is not None:
            self._quantizer.apply(self._model)

    def begin(self, seed: int, device: torch.device) -> None:
        """Start the noise of one call from a seed: the same calls have the same noise."""
        if self._noise:
            self._generator = torch.Generator(device).manual_seed(random.Random(f"router/{seed}").getrandbits(62))

    def _reroute(self, router: Any, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        """The router's outputs ``(logits [n, E], weights [n, k], experts [n, k])`` from its logits with noise added."""
        logits, weights, experts = output
        assert self._generator is not None, "begin comes first"
        noise = torch.empty(logits.shape, device=logits.device).normal_(generator=self._generator)
        noisy = logits + (self._noise * noise).to(logits.dtype)
        chosen, ids = noisy.softmax(-1, dtype=torch.float32).topk(experts.shape[-1], dim=-1)
        if router.norm_topk_prob:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        return noisy, chosen.to(weights.dtype), ids
