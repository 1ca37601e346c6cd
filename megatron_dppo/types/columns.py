"""Columns of numbers as bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def as_bytes(column: Tensor) -> Tensor:
    """uint8 ``[nbytes]`` of the numbers in order; the same memory where they lie together, which ``column`` keeps.

    Torch calls a tensor of one element contiguous whatever its stride is, and then cannot view it as another type.

    Example:
        >>> as_bytes(torch.tensor([[1, 2], [3, 4]], dtype=torch.int16)[:, 1]).tolist()
        [2, 0, 4, 0]
    """
    return column.detach().contiguous().as_strided((column.numel(),), (1,)).view(torch.uint8)
