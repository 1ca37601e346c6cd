"""Attention kernels on a rehearsed GPU: the pairs that sliding windows leave, and sinks without a mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def counted_keys(keys: int, window: int | None) -> int:
    """Return the number of keys with which causal attention, half of the pairs, has as many pairs as with a window.

    ``window`` is the number of visible keys before the query's own. None means all.
    """
    if window is None or window + 1 >= keys:
        return keys
    visible = window + 1
    pairs = keys * visible - visible * window // 2
    return min(keys, round(2 * pairs / keys))


class Sinks(torch.autograd.Function):
    """Sinks that a kernel adds to its softmax: they need no memory beyond their gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, sinks: Tensor) -> Tensor:
        """Return the attention's result, which has the sinks already."""
        ctx.save_for_backward(sinks)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the result and of the sinks."""
        return gradients[0], torch.empty_like(ctx.saved_tensors[0])
