"""The weights of a frozen reference policy, kept on the host and swapped into the model when they are needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megatron_dppo.mcore.away import to_host
from megatron_dppo.mcore.router_biases import router_biases


class ReferenceWeights:
    """A copy of this rank's shard, made when the model holds the reference policy.

    One copy of the shard in host memory for as long as this lives, and a second one while the two are swapped; nothing
    on the device. Gradients and optimizer are not touched.

    Args:
        chunks: the unwrapped model chunks of this rank.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._parameters = [
            tensor for chunk in chunks for tensor in (*chunk.parameters(), *dict(router_biases(chunk)).values())
        ]
        self._host = [to_host(parameter) for parameter in self._parameters]

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model is the reference policy inside, and what it was before, bit for bit, afterwards."""
        policy = [to_host(parameter) for parameter in self._parameters]
        self._write(self._host)
        try:
            yield
        finally:
            self._write(policy)

    @torch.no_grad()
    def _write(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value)
