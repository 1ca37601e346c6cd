"""Kernels of gated delta nets on a rehearsed GPU: sizes and arithmetic of flash-linear-attention's, without a loop.

Source: ``fla/ops/gated_delta_rule`` (``chunk.py``, ``wy_fast.py``), ``convolution.py`` and ``fused_norm_gate.py``.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_dppo.mcore.delta_rule import DeltaNetKernels

_CHUNK = 64
"""Tokens of a chunk, as in flash-linear-attention."""


class _Convolution(torch.autograd.Function):
    """Depthwise convolution with SiLU. It keeps its inputs, and computes itself again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _convolve(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        x, weight = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            output = _convolve(x, weight)
        return torch.autograd.grad(output, (x, weight), gradients[0])


def _convolve(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve ``x [T, channels]`` with ``weight [channels, width]``; without what is before the first token."""
    channels, width = weight.shape
    output = torch.conv1d(x.T[None], weight[:, None], padding=width - 1, groups=channels)
    return output[0, :, : len(x)].T


class DeltaRule(torch.autograd.Function):
    """Products of all chunks at once, and the tensors that the kernels keep for the backward pass.

    A chunk's state depends on the one before it. Sizes do not, so nothing runs chunk by chunk.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Return an output like ``value [T, heads, e]``; arguments as those of ``DeltaNetKernels.mix``."""
        query, key = query * 1.0, key * 1.0  # normalized
        sums = decay.cumsum(0)
        sizes = _Sizes(key, value)
        sizes.product("cdc")
        inverse = key.new_empty(*decay.shape, _CHUNK)
        tensors = sizes.recurrence()
        sizes.product("cdc")
        sizes.product("cde")
        sizes.product("cce")
        del tensors
        ctx.save_for_backward(query, key, value, sums, beta, inverse)
        return torch.empty_like(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of all arguments. States are computed again."""
        del gradients
        query, key, value, sums, beta, _ = ctx.saved_tensors
        sizes = _Sizes(key, value)
        tensors = sizes.recurrence()
        # Values within their chunk, then states and values from the last chunk to the first.
        tensors += sizes.products("cdc", "cce")
        tensors += sizes.products("cde", "dce", "dce")
        # Queries, keys, and the reads of the state.
        tensors += sizes.products("ced", "ced", "ced", "cec", "ccd", "ccd")
        # The triangular system, its inverse and its keys.
        tensors += sizes.products("cdc", "cec", "ccd", "cce", "ccc", "ccc", "cdc", "ccd", "ccd")
        del tensors
        return tuple(torch.empty_like(tensor) for tensor in (query, key, value, sums, beta))


class _Sizes:
    """Products of matrices ``[c, d, e]``: tokens of a chunk, sizes of keys and of values."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        tokens, heads, value_dim = value.shape
        self._like = value
        self._count = heads * -(-tokens // _CHUNK)
        self._size = {"c": _CHUNK, "d": key.shape[-1], "e": value_dim}

    def product(self, sizes: str) -> Tensor:
        """Multiply ``[rows, inner]`` by ``[inner, columns]`` in every chunk and head, with factors without memory."""
        rows, inner, columns = (self._size[name] for name in sizes)
        left, right = (self._like.new_empty(1, 1, 1) for _ in range(2))
        return torch.bmm(left.expand(self._count, rows, inner), right.expand(self._count, inner, columns))

    def products(self, *sizes: str) -> list[Tensor]:
        """Return several products."""
        return [self.product(one) for one in sizes]

    def recurrence(self) -> list[Tensor]:
        """Return the solved keys and values of each chunk, its state, and the values that change it."""
        return self.products("ccd", "cce", "dce", "cde")


class _Gate(torch.autograd.Function):
    """Norm of each head times its gate. It keeps its inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, gates, weight)
        return x * gates

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        x, gates, weight = ctx.saved_tensors
        return gradients[0] * gates, gradients[0] * x, torch.empty_like(weight)


# The last argument, of the row or of the norm, changes no size.
REHEARSED_KERNELS = DeltaNetKernels(
    lambda x, weight, row: _Convolution.apply(x, weight),
    lambda query, key, value, decay, beta, row: DeltaRule.apply(query, key, value, decay, beta),
    lambda x, gates, weight, eps: _Gate.apply(x, gates, weight),
)
