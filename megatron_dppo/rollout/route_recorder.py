"""Reads which experts the routers of a transformers model choose, and their combine weights, by hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.types import MISSING_EXPERT, RoutingShape, with_weights


class RouteRecorder:
    """Keeps the choices of the latest forward pass.

    Args:
        model: a causal language model of transformers whose routers (``layers[i].mlp.gate``) return
            ``(logits, weights [tokens, k], experts [tokens, k])``, as those of Qwen3-MoE and Qwen2-MoE do. The weights
            are what the outputs of the experts are multiplied by.
        shape: of that model.
    """

    def __init__(self, model: Any, shape: RoutingShape) -> None:
        self._shape = shape
        layers = enumerate(model.model.layers)
        self._routers = {i: layer.mlp.gate for i, layer in layers if i not in shape.dense_layers}
        self._chosen: dict[int, Tensor] = {}

    @contextmanager
    def watching(self, *, weights: bool = False) -> Iterator[None]:
        """Record inside, with or without the combine weights."""
        self._shape = replace(self._shape, weights=weights)
        handles = [
            router.register_forward_hook(lambda _module, _inputs, output, i=layer: self._keep(i, output[1], output[2]))
            for layer, router in self._routers.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, layer: int, weights: Tensor, experts: Tensor) -> None:
        routes = experts.to(self._shape.dtype)
        self._chosen[layer] = with_weights(routes, weights) if self._shape.weights else routes

    def take(self, batch: int) -> Tensor:
        """The choices of the latest forward pass over ``batch`` rows, ``[batch, tokens, L, k]``; dense layers missing.
        With weights ``[batch, tokens, L, width]``.

        Raises:
            RuntimeError: a router did not run.
        """
        if idle := self._routers.keys() - self._chosen.keys():
            raise RuntimeError(f"no choice of experts was seen in layers {sorted(idle)}; their routers did not run")
        first = next(iter(self._chosen.values()))
        tokens = first.shape[0] // batch
        missing = MISSING_EXPERT[self._shape.dtype]
        found = first.new_full((batch, tokens, self._shape.num_layers, self._shape.width), missing)
        layers = torch.tensor(sorted(self._chosen), device=first.device)
        together = torch.stack([self._chosen[i] for i in sorted(self._chosen)], 1)
        found[:, :, layers] = together.view(batch, tokens, len(layers), self._shape.width)
        self._chosen = {}
        return found
