"""Linear attention of a transformers model, computed as in decoding: the prompt at once, then one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron_dppo.engines.local.sampler import LINEAR_ATTENTION, linear_attention_layers
from megatron_dppo.types.model_folder import HfConfig


class TokenByToken(nn.Module):
    """Linear attention that reads some tokens at once and every later one alone, with the state before it."""

    def __init__(self, layer: nn.Module, hf_config: HfConfig) -> None:
        super().__init__()
        self._layer = layer
        self._hf_config = hf_config
        self.num_at_once = 1
        """Number of tokens that are read at once."""

    def forward(self, hidden_states: Tensor, **_: object) -> Tensor:
        """Compute the layer for one sequence ``[1, T, hidden_size]`` without padding."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self._hf_config)
        at_once = min(self.num_at_once, hidden_states.shape[1])
        parts = hidden_states.split([at_once] + [1] * (hidden_states.shape[1] - at_once), dim=1)
        return torch.cat([self._layer(hidden_states=part, cache_params=cache) for part in parts], dim=1)


@contextmanager
def decoding_linear_attention(model: Any) -> Iterator[Callable[[int], None]]:
    """Compute linear attention token by token in a ``with`` block, and everything else in one pass.

    Yields:
        Function that sets how many tokens of the next sequence are read at once.
    """
    layers = linear_attention_layers(model)
    originals = [getattr(layer, LINEAR_ATTENTION) for layer in layers]
    wrappers = [TokenByToken(original, model.config) for original in originals]

    def read_at_once(num_tokens: int) -> None:
        for wrapper in wrappers:
            wrapper.num_at_once = num_tokens

    try:
        for layer, wrapper in zip(layers, wrappers, strict=True):
            setattr(layer, LINEAR_ATTENTION, wrapper)
        yield read_at_once
    finally:
        for layer, original in zip(layers, originals, strict=True):
            setattr(layer, LINEAR_ATTENTION, original)
