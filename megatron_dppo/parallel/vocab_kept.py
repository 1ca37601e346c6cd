"""A softmax over the kept set of each row: what a filter cut from the rollout's distribution is cut from the policy's.

The entries of a shard's logits that are outside the row's set become -inf. Everything that follows from the logits
(statistics, gradient, Top-K, entropy, over any number of shards) is then that of the filtered distribution, and nothing
more is exchanged. A row with an empty set stays whole.
"""

from __future__ import annotations

import torch
from torch import Tensor


def keep_only_(logits: Tensor, ids: Tensor, counts: Tensor, first: int, own: int) -> Tensor:
    """Cut in place; returns ``logits``. Besides it, memory for a few numbers a kept id; nothing waits for the device.

    Args:
        logits: ``[n, W]`` of this shard.
        ids: ``[N]`` int32 global ids on the device of the logits, row by row.
        counts: ``[n]`` int32 on the CPU, how many of them each row has; 0 = the whole vocabulary.
        first: the global id of the shard's first entry.
        own: entries of the shard that are not padding.
    """
    rows, _ = set_rows(ids, counts)
    local = ids - first
    places = local.clamp(0, max(own - 1, 0)).long().add_(rows * logits.shape[1])
    flat = logits.view(-1)
    # An id of another shard stands for a place that may be another's: -inf there changes nothing under a maximum.
    values = flat[places].masked_fill_((local < 0) | (local >= own), -torch.inf)
    # On the CPU half the time of masked_fill_ with a mask of rows.
    logits.index_fill_(0, _on_device_of(logits, counts.nonzero()[:, 0]), -torch.inf)
    flat.scatter_reduce_(0, places, values, "amax")
    return logits


def keep_only(logits: Tensor, ids: Tensor, counts: Tensor, first: int, own: int) -> Tensor:
    """``keep_only_`` with gradient, as a new tensor; what was cut gets gradient 0."""
    rows, has_set = set_rows(ids, counts)
    local = ids.long() - first
    here = (local >= 0) & (local < own)
    kept = ~has_set[:, None].expand_as(logits).clone()
    kept[rows[here], local[here]] = True
    return torch.where(kept, logits, -torch.inf)


def set_rows(ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The row of each id ``[N]``, and whether each row has a set ``[n]``."""
    counts = _on_device_of(ids, counts)
    return torch.repeat_interleave(counts.long(), output_size=len(ids)), counts > 0


def _on_device_of(other: Tensor, values: Tensor) -> Tensor:
    """``values`` of the CPU where ``other`` is; nothing waits."""
    return values.pin_memory().to(other.device, non_blocking=True) if other.is_cuda else values
