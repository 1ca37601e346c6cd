"""Sampling masks as a reference has them: over whole rows of log-probabilities in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dppo.types import SamplingMask

TOP_P = 0.8


def keep(log_p: Tensor, sets: SamplingMask | None) -> Tensor:
    """``[T, V]`` renormalised over the sets of the last positions."""
    if sets is None:
        return log_p
    cut = torch.zeros(log_p.shape, dtype=torch.bool)
    for row, ids in enumerate(sets.ids.split(sets.counts.tolist()), len(log_p) - len(sets)):
        if len(ids):
            cut[row] = True
            cut[row, ids.long()] = False
    return log_p.masked_fill(cut, -torch.inf).log_softmax(-1)


def top_p(log_p: Tensor) -> Tensor:
    """The ids of a row that hold ``TOP_P`` of its mass, by their probability."""
    values, order = log_p.sort(descending=True)
    return order[values.exp().cumsum(0) - values.exp() < TOP_P].int()
