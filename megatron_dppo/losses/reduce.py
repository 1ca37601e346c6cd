"""Sums and maxima over the loss mask, safe against anything that stands outside it."""

from __future__ import annotations

import torch
from torch import Tensor


def statistics_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype of per-token statistics: float64 if any input is float64, else float32 (also for bf16 inputs)."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of ``values [T]`` where ``mask [T]`` is True, as a scalar; a masked-out NaN or infinity adds exactly 0."""
    return torch.where(mask, values, 0.0).sum()


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """The largest of 0 and of ``values [T]`` where ``mask [T]`` is True, as a scalar."""
    if values.numel() == 0:
        return values.new_zeros(())
    return torch.where(mask, values, 0.0).clamp(min=0).amax()
