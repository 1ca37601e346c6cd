"""Controlled differences between the local engine and the policy: what a server's numerics do, in a known dose."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.rollout.quantized import WeightQuantizer
from megatron_dppo.types import RoutingShape


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
