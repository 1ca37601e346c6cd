"""A linear layer of several experts on rows that are sorted by expert: one GEMM an expert, or all in one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_BYTES = 16
"""Rows of what the kernel reads begin at a multiple of this (TMA)."""
_CAPABILITY = (9, 0)
"""The oldest GPUs that torch's kernel is for (Hopper)"""


def grouped_linear(x: Tensor, splits: Sequence[int], weights: Sequence[Tensor]) -> Tensor:
    """``x [sum(splits), in]``, the rows of one expert after those of the other, times ``weights``, each ``[out, in]``.

    On Hopper and later in bf16 by torch's grouped GEMM, for which the weights are copied into one tensor in each of
    forward and backward; else one GEMM an expert.

    Returns:
        ``[sum(splits), out]``
    """
    if has_grouped_gemm(x, weights[0]):
        return grouped_gemm(x, splits, weights)
    return torch.cat([part @ weight.t() for part, weight in zip(torch.split(x, list(splits)), weights, strict=True)])


def has_grouped_gemm(x: Tensor, weight: Tensor) -> bool:
    """Whether torch has the kernel for such numbers on such a device."""
    return (
        x.is_cuda
        and len(x) > 0
        and x.dtype == weight.dtype == torch.bfloat16
        and hasattr(torch, "_grouped_mm")
        and torch.cuda.get_device_capability(x.device) >= _CAPABILITY
        and all(size * x.element_size() % _BYTES == 0 for size in weight.shape)
    )


def grouped_gemm(x: Tensor, splits: Sequence[int], weights: Sequence[Tensor]) -> Tensor:
    """``grouped_linear`` by ``torch._grouped_mm``, which also has an implementation for the CPU; at least one row."""
    result: Tensor = _GroupedGemm.apply(_plain_strides(x), tuple(splits), *weights)
    return result


class _GroupedGemm(torch.autograd.Function):
    """Keeps the experts' own weights for the backward, not the copy of all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: tuple[int, ...], *weights: Tensor) -> Tensor:
        ends = torch.tensor(splits, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(x.device, non_blocking=True)
        ctx.save_for_backward(x, ends, *weights)
        ctx.splits = splits
        return torch._grouped_mm(x, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        grad = _plain_strides(grad)
        of_x = torch._grouped_mm(grad, torch.stack(weights), offs=ends) if ctx.needs_input_grad[0] else None
        of_weights: Sequence[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[2:]):
            of_weights = torch._grouped_mm(grad.t(), x, offs=ends).unbind(0)
            for rows, of_weight in zip(ctx.splits, of_weights, strict=True):
                if not rows:
                    of_weight.zero_()  # a product over no rows: the kernel may leave it unwritten
        return of_x, None, *of_weights


def _plain_strides(x: Tensor) -> Tensor:
    """Contiguous also by the strides of dimensions of one element, which the kernel checks."""
    return x.contiguous().view(-1).view(x.shape)
