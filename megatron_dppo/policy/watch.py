"""What the losses of a step saw of every token, by sample."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from megatron_dppo.data.packing import RowShape
from megatron_dppo.policy.packed import Packed
from megatron_dppo.types import TrainingSample

if TYPE_CHECKING:
    from megatron_dppo.mcore.row import SeenRow


class SeenSample(NamedTuple):
    """One sample as the last update that trained on it saw it; T tokens, aligned to the labels, on the CPU."""

    update: int
    """of the step, from 0"""
    logprobs: Tensor
    """[T] fp32 log pi, before that update; no meaning outside the loss mask"""
    keep: Tensor
    """[T] bool, True = the token had a gradient"""


class TokenWatch:
    """Gathers the tokens of one step's updates on this rank.

    Attributes:
        samples: by ``TrainingSample.number``; empty but on the last pipeline stage.
    """

    def __init__(self) -> None:
        self.samples: dict[int, SeenSample] = {}
        self._updates = 0

    def add(self, samples: Sequence[TrainingSample], packed: Packed, rows: Sequence[SeenRow], shape: RowShape) -> None:
        """One update: this rank's samples, how they were packed, and what the loss saw of each row."""
        for part, row in zip(packed.bins, rows, strict=False):  # no rows but on the last stage
            starts = accumulate([0, *(shape.padded(samples[i].num_tokens) for i in part)])
            for i, start in zip(part, starts, strict=False):
                own = slice(start, start + samples[i].num_tokens)
                seen = SeenSample(self._updates, row.logprobs[own].clone(), row.keep[own].clone())
                self.samples[samples[i].number] = seen
        self._updates += 1
