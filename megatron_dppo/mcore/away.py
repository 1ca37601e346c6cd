"""Frozen weights in host memory, which come to the device while they are used: all at once, or layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Away:
    """Some parameters; while they are away they are empty, so that nobody uses them unseen.

    Args:
        parameters: as they are; on CUDA they are copied to page-locked memory.
        device: where they are used.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self._kept = [(p, to_host(p) if p.is_cuda else p.data) for p in parameters]
        self._device = device
        self.leave()

    def come(self) -> None:
        """They are on the device."""
        for parameter, value in self._kept:
            parameter.data = value.to(self._device, non_blocking=True)

    def leave(self) -> None:
        """They are not."""
        for parameter, _ in self._kept:
            parameter.data = parameter.data.new_empty(0)


class AwayModel:
    """All weights of model chunks.

    Args:
        chunks: of this rank, unwrapped; they are only used forward, without gradients.
        device: where.
        by_layer: transformer layers come one at a time, in every pass over a micro-batch; all else comes for the time
            of ``present``.
    """

    def __init__(self, chunks: Sequence[Any], device: torch.device, *, by_layer: bool) -> None:
        layers = [layer for chunk in chunks for layer in chunk.decoder.layers] if by_layer else []
        of_layers = {id(p) for layer in layers for p in layer.parameters()}
        rest = {id(p): p for chunk in chunks for p in chunk.parameters() if id(p) not in of_layers}
        self._rest = Away(list(rest.values()), device)
        for layer in layers:
            away = Away(list(layer.parameters()), device)
            layer.register_forward_pre_hook(lambda *_, away=away: away.come())
            layer.register_forward_hook(lambda *_, away=away: away.leave())

    @contextmanager
    def present(self) -> Iterator[None]:
        """The chunks can be used inside."""
        self._rest.come()
        try:
            yield
        finally:
            self._rest.leave()


def to_host(values: Tensor) -> Tensor:
    """A copy in host memory, page-locked where it comes from a GPU."""
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    return copy.copy_(values.detach())
