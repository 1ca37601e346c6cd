"""Reads which experts the routers of a transformers model choose, by hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.types import MISSING_EXPERT, RoutingShape


class RouteRecorder:
    """Keeps the choices of the latest forward pass.

    Args:
        model: a causal language model of transformers whose routers (``layers[i].mlp.gate``) return
            ``(logits, weights, experts [tokens, k])``, as those of Qwen3-MoE and Qwen2-MoE do.
        shape: of that model.
    """

    def __init__(self, model: Any, shape: RoutingShape) -> None:
        self._shape = shape
        layers = enumerate(model.model.layers)
        self._routers = {i: layer.mlp.gate for i, layer in layers if i not in shape.dense_layers}
        self._chosen: dict[int, Tensor] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record inside."""
        handles = [
            router.register_forward_hook(lambda _module, _inputs, output, i=layer: self._keep(i, output[2]))
            for layer, router in self._routers.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, layer: int, experts: Tensor) -> None:
        self._chosen[layer] = experts.to(self._shape.dtype)

    def take(self, batch: int) -> Tensor:
        """The choices of the latest forward pass over ``batch`` rows, ``[batch, tokens, L, k]``; dense layers missing.

        Raises:
            RuntimeError: a router did not run.
        """
        if idle := self._routers.keys() - self._chosen.keys():
            raise RuntimeError(f"no choice of experts was seen in layers {sorted(idle)}; their routers did not run")
        first = next(iter(self._chosen.values()))
        tokens = first.shape[0] // batch
        missing = MISSING_EXPERT[self._shape.dtype]
        found = first.new_full((batch, tokens, self._shape.num_layers, self._shape.topk), missing)
        layers = torch.tensor(sorted(self._chosen), device=first.device)
        together = torch.stack([self._chosen[i] for i in sorted(self._chosen)], 1)
        found[:, :, layers] = together.view(batch, tokens, len(layers), self._shape.topk)
        self._chosen = {}
        return found
