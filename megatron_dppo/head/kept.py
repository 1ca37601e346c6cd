"""The check of kept sets that a head is given."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dppo.parallel.vocab_kept import set_rows
from megatron_dppo.types import KeptSets, check_kept


def check_sets(kept: KeptSets | None, labels: Tensor, vocab_size: int) -> None:
    """Kept sets of ids of the vocabulary, each with the label of its row; ``labels [n]`` are of the same rows.

    Raises:
        ValueError: they are not. On CUDA a device-side assertion where it is about an id, as in ``rows.check_ids``.
    """
    if kept is None:
        return
    check_kept(kept, len(labels))
    rows, has_set = set_rows(kept.ids, kept.counts)
    outside = (kept.ids < 0) | (kept.ids >= vocab_size)
    is_label = (kept.ids == labels[rows]).int()
    lacks_label = has_set & (
        torch.zeros_like(has_set, dtype=torch.int32).scatter_reduce_(0, rows, is_label, "amax") == 0
    )
    if kept.ids.is_cuda:
        torch._assert_async(~outside.any(), f"a kept id is outside the vocabulary [0, {vocab_size})")
        torch._assert_async(~lacks_label.any(), "a label is outside its kept set")
    elif bool(outside.any()):
        raise ValueError(f"kept id {int(kept.ids[outside][0])} is outside the vocabulary [0, {vocab_size})")
    elif bool(lacks_label.any()):
        row = int(lacks_label.nonzero()[0])
        raise ValueError(f"label {int(labels[row])} of the {row}-th row with loss is outside its kept set")
