"""Perturbations of the local engine: fake quantization by nvidia-modelopt, noisy routers, coarse states, filters."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from megatron_dppo.engines.local.sampler import LINEAR_ATTENTION, linear_attention_layers, routers_by_layer
from megatron_dppo.errors import ConfigError
from megatron_dppo.hf.families.fused_experts import match_fused
from megatron_dppo.types import RoutingShape

CONFIGS = {"fp8": "FP8_DEFAULT_CFG", "int8": "INT8_WEIGHT_ONLY_CFG", "int4": "INT4_BLOCKWISE_WEIGHT_ONLY_CFG"}
"""Configuration of modelopt for each value of ``rollout.perturbation.weights``; its weight quantizer is used.

FP8 E4M3 has one scale per tensor, INT8 one per output channel, INT4 one per 128 inputs of a channel.
"""
QUANTIZATION_MODULE = "modelopt.torch.quantization"
_EXCLUDED = ("embed_tokens", "lm_head", "mlp.gate.", "mlp.router.", "shared_expert_gate")
"""Parts of the names that modelopt's configurations exclude: embedding, output layer, routers."""


class WeightQuantizer:
    """Fake quantization: rounds the weights of a model to a coarse type and stores them in the model's dtype."""

    def __init__(self, weights_format: str) -> None:
        quantization = _import_modelopt(weights_format)
        entries = getattr(quantization, CONFIGS[weights_format])["quant_cfg"]
        # Unpacking fails if modelopt's configuration does not have exactly one such entry.
        (settings,) = (entry["cfg"] for entry in entries if entry["quantizer_name"] == "*weight_quantizer")
        self._attributes = import_module(f"{quantization.__name__}.config").QuantizerAttributeConfig(**settings)
        self._quantizer = import_module(f"{quantization.__name__}.nn").TensorQuantizer

    @torch.no_grad()
    def apply(self, model: nn.Module) -> None:
        """Round all linear weights in place, each expert separately, with scales of the current weights."""
        for weight in quantized_weights(model):
            weight.copy_(self._round(weight))

    def _round(self, weight: Tensor) -> Tensor:
        # Calibration first: the pass without quantization measures the scale that the second pass uses.
        quantizer = self._quantizer(self._attributes).to(weight.device)
        quantizer.disable_quant()
        quantizer.enable_calib()
        quantizer(weight)
        quantizer.load_calib_amax()
        quantizer.disable_calib()
        quantizer.enable_quant()
        return quantizer(weight)


def quantized_weights(model: nn.Module) -> Iterator[Tensor]:
    """Yield the matrices to round, each ``[out, in]``."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in _EXCLUDED):
            continue
        if match_fused(name) is not None and parameter.dim() == 3:
            yield from parameter
        elif parameter.dim() == 2:
            yield parameter


def require_modelopt(weights_format: str) -> None:
    """Check that nvidia-modelopt is installed, without importing it."""
    if find_spec("modelopt") is None:
        raise _missing_modelopt(weights_format, "not installed")


def _import_modelopt(weights_format: str) -> Any:
    try:
        return import_module(QUANTIZATION_MODULE)
    except ImportError as error:
        raise _missing_modelopt(weights_format, f"cannot be imported: {error}") from error


def _missing_modelopt(weights_format: str, reason: str) -> ConfigError:
    return ConfigError(
        f"rollout.perturbation.weights = {weights_format!r} rounds with nvidia-modelopt ({reason}); install it with "
        "pip install 'megatron-dppo[modelopt]', or set weights = 'none'"
    )


@dataclass(frozen=True)
class Perturbation:
    """Deliberate differences of the engine from the policy, see ``[rollout.perturbation]``; none by default."""

    weights: str = "none"
    """Key of ``CONFIGS``, or ``none``."""
    router_noise: float = 0.0
    """Standard deviation of the noise on router logits."""
    unrecorded_top_p: float = 1.0
    """Top-p filter that the log-probabilities do not include; 1 disables it."""
    unrecorded_temperature: float = 1.0
    """Factor of the temperature that the log-probabilities do not include."""
    state_dtype: str = "fp32"
    """Dtype of the recurrent states of linear attention."""

    def apply(self, model: Any, routing: RoutingShape | None) -> PerturbedModel:
        """Change a model in place; see ``PerturbedModel``."""
        return PerturbedModel(model, self, routing)

    def check(self) -> None:
        """Check that nvidia-modelopt can be imported if weights are to be quantized."""
        if self.weights != "none":
            WeightQuantizer(self.weights)


class PerturbedModel:
    """A transformers model with quantized weights, noisy routers, and coarse states of linear attention."""

    def __init__(self, model: Any, perturbation: Perturbation, routing: RoutingShape | None) -> None:
        self._model = model
        self._noise = perturbation.router_noise
        self._quantizer = None if perturbation.weights == "none" else WeightQuantizer(perturbation.weights)
        self._generator: torch.Generator | None = None
        if perturbation.state_dtype == "bf16":
            round_states(model, torch.bfloat16)
        if not self._noise:
            return
        if routing is None:
            raise ValueError(f"router_noise = {self._noise} for a dense model, which has no routers")
        self._weights_add_to_one = routing.weights_add_to_one
        for router in routers_by_layer(model, routing).values():
            # Registered before the hooks of a RouteRecorder, which then records the perturbed choices.
            router.register_forward_hook(self._add_noise)

    def quantize_weights(self) -> None:
        """Quantize the weights that were just copied into the model."""
        if self._quantizer is not None:
            self._quantizer.apply(self._model)

    def seed_noise(self, seed: int, device: torch.device) -> None:
        """Seed the noise of one call, so that equal calls get equal noise."""
        if self._noise:
            # Not the seed itself: the sampler uses that.
            self._generator = torch.Generator(device).manual_seed(random.Random(f"router/{seed}").getrandbits(62))

    def _add_noise(self, router: Any, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Return the router's ``(logits [n, E], weights [n, k], experts [n, k])`` for its logits with noise added."""
        logits, weights, experts = output
        assert self._generator is not None, "seed_noise comes first"
        noise = torch.empty(logits.shape, device=logits.device).normal_(generator=self._generator)
        noisy = logits + (self._noise * noise).to(logits.dtype)
        new_weights, new_experts = noisy.softmax(-1, dtype=torch.float32).topk(experts.shape[-1], dim=-1)
        if self._weights_add_to_one:
            new_weights = new_weights / new_weights.sum(-1, keepdim=True)
        return noisy, new_weights.to(weights.dtype), new_experts


def round_states(model: Any, dtype: torch.dtype) -> None:
    """Round the recurrent states of linear attention to a dtype whenever a layer has updated them."""

    def round_state(layer: Any, _args: Any, kwargs: dict[str, Any], _output: Tensor) -> None:
        cache = kwargs.get("cache_params")
        if cache is not None:
            state = cache.get_recurrent_state(layer.layer_idx)
            state.copy_(state.to(dtype))

    for layer in linear_attention_layers(model):
        getattr(layer, LINEAR_ATTENTION).register_forward_hook(round_state, with_kwargs=True)
