"""What top-p, top-k and min-p leave of each token, while a batch is decoded."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from megatron_dppo.types import KeptSets


class KeptRecord:
    """What the filters left of each token of ``batch`` responses, in the order of the steps."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, rows: Tensor, distribution: Tensor) -> None:
        """Of one step: the log-probabilities ``[b, V]`` of ``rows [b]``, -inf where a filter cut."""
        is_kept = distribution > -torch.inf
        self._steps.append((rows, is_kept.sum(1), is_kept.nonzero()[:, 1].int()))

    def result(self) -> list[KeptSets]:
        """Of each response, as many as it took part in steps."""
        rows, counts, ids = (torch.cat(parts) for parts in zip(*self._steps, strict=True))
        ids = ids[rows.repeat_interleave(counts).argsort(stable=True)]
        counts = counts[rows.argsort(stable=True)]
        steps = rows.bincount(minlength=self._batch).tolist()
        whole = KeptSets(ids, counts.int().cpu())
        ends = list(accumulate(steps))
        return [whole[end - number : end] for end, number in zip(ends, steps, strict=True)]
