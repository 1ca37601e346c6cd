"""Linear layers of several experts on tokens sorted by expert: one GEMM per expert, or torch's grouped GEMM."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 16
"""Alignment in bytes of the rows that the kernel reads (TMA)."""
_CAPABILITY = (9, 0)
"""Lowest compute capability of torch's kernel (Hopper)."""


def grouped_linear(x: Tensor, splits: Sequence[int], weights: Sequence[Tensor]) -> Tensor:
    """Multiply each expert's tokens by its weight.

    On Hopper and newer GPUs in bf16 this is torch's grouped GEMM, which needs a copy of all weights in one tensor, in
    forward and in backward. Elsewhere it is one GEMM per expert. ``x [sum(splits), in_features]`` is sorted by expert,
    weights are ``[out_features, in_features]``, the result is ``[sum(splits), out_features]``.
    """
    if has_grouped_gemm(x, weights[0]):
        return grouped_gemm(x, splits, weights)
    return torch.cat([part @ weight.t() for part, weight in zip(torch.split(x, list(splits)), weights, strict=True)])


def has_grouped_gemm(x: Tensor, weight: Tensor) -> bool:
    """Return True if torch has the grouped GEMM for this dtype, device and shape."""
    return (
        x.is_cuda
        and len(x) > 0
        and x.dtype == weight.dtype == torch.bfloat16
        and hasattr(torch, "_grouped_mm")
        and torch.cuda.get_device_capability(x.device) >= _CAPABILITY
        and all(size * x.element_size() % _ALIGNMENT == 0 for size in weight.shape)
    )


def grouped_gemm(x: Tensor, splits: Sequence[int], weights: Sequence[Tensor]) -> Tensor:
    """Compute ``grouped_linear`` with ``torch._grouped_mm``, on CPU too; needs at least one token."""
    return _GroupedGemm.apply(_plain_strides(x), tuple(splits), *weights)


class _GroupedGemm(torch.autograd.Function):
    """Grouped GEMM that saves the experts' weights for backward instead of their copy in one tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: tuple[int, ...], *weights: Tensor) -> Tensor:
        # ``offs``: index after the last token of each expert.
        ends = torch.tensor(splits, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(x.device, non_blocking=True)
        ctx.save_for_backward(x, ends, *weights)
        ctx.splits = splits
        # The kernel expects ``[num_experts, in, out]``.
        return torch._grouped_mm(x, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        grad = _plain_strides(grad)
        grad_x = torch._grouped_mm(grad, torch.stack(weights), offs=ends) if ctx.needs_input_grad[0] else None
        grad_weights: Sequence[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[2:]):
            grad_weights = torch._grouped_mm(grad.t(), x, offs=ends).unbind(0)
            for rows, grad_weight in zip(ctx.splits, grad_weights, strict=True):
                # The kernel may leave the result of an expert without tokens unwritten.
                if not rows:
                    grad_weight.zero_()
        return grad_x, None, *grad_weights


def _plain_strides(x: Tensor) -> Tensor:
    """Return ``x`` contiguous, with canonical strides in dimensions of size 1 too, which the kernel checks."""
    return x.contiguous().view(-1).view(x.shape)
