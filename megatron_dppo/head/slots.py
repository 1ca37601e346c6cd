"""The gradient of a loss in log p(id) of the Top-K ids too, on top of the one in log p(label).

The gradient of the logits is that of ``row_kernels.row_gradient`` with g the sum over label and ids, except at those
entries themselves: with b the sum of the derivatives by log p of the entry (a label may be an id as well),

    (b - p (g + e (log p + H))) / temperature
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SlotGradient(NamedTuple):
    """Of some rows."""

    ids: Tensor
    """[n, K] index in this shard, -1 = not of this shard or an unused slot"""
    gradient: Tensor
    """[n, K] the loss' derivative by log p(id), of all shards' ids; 0 in unused slots"""

    def total(self, grad_logprobs: Tensor) -> Tensor:
        """``[n]`` g: with the derivative by log p(label) ``[n]``."""
        return grad_logprobs + self.gradient.sum(1)


def chosen_entries(labels: Tensor, slots: SlotGradient, grad_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """The places ``[n, 1 + K]`` of label and ids, -1 elsewhere, and the derivative b of each."""
    ids, of_ids = slots.ids, slots.gradient
    both = (ids == labels[:, None]) & (ids >= 0)
    of_label = grad_logprobs + torch.where(both, of_ids, 0.0).sum(1)
    of_ids = of_ids + torch.where(both, grad_logprobs[:, None], 0.0)
    return torch.cat([labels[:, None], ids], 1), torch.cat([of_label[:, None], of_ids], 1)


def write_entries(out: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """``values [n, S]`` at ``places [n, S]`` of ``out [n, W]``, nothing where a place is -1.

    A place that stands twice in a row has the same value twice. Without a search for the used ones, which would wait
    for the device: an unused place repeats a used one, or what the row has. By index and not by ``scatter_``, which on
    the CPU takes a bf16 or fp16 tensor through an fp32 copy of all of it (torch 2.13).
    """
    used = places >= 0
    last = places.argmax(1, keepdim=True)
    at = torch.where(used, places, places.gather(1, last)).clamp(min=0)
    values = torch.where(used, values, values.gather(1, last)).to(out.dtype)
    values = torch.where(used.any(1, keepdim=True), values, out[:, :1])
    out[torch.arange(len(out), device=out.device)[:, None], at] = values
    return out
