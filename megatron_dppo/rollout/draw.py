"""Seeded sampling inside transformers' ``generate`` that leaves the random states of the process alone."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from megatron_dppo.types import SamplingParams


class Draw(LogitsProcessor):
    """Draws each token itself, by a generator of its own, and leaves only that token for a greedy ``generate``.

    ``generate`` would draw by the global generator. A rollout in a background thread must not: the trainer reads and
    sets that one (dropout, recomputation, checkpoints), and both would get other numbers on every run.

    Args:
        params: temperature above 0.
        generator: on the device of the logits.

    Attributes:
        scores: ``[B, V]`` fp32 a step, the logits after temperature and filters: what was sampled from.
    """

    def __init__(self, params: SamplingParams, generator: torch.Generator) -> None:
        self.scores: list[Tensor] = []
        self._generator = generator
        self._filters: list[LogitsProcessor] = []
        if params.temperature != 1:
            self._filters.append(TemperatureLogitsWarper(params.temperature))
        if params.top_k:
            self._filters.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            self._filters.append(TopPLogitsWarper(params.top_p))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """All logits but the drawn token's become ``-inf``."""
        for filtered in self._filters:
            scores = filtered(input_ids, scores)
        self.scores.append(scores)
        token = torch.multinomial(scores.softmax(-1), 1, generator=self._generator)
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)
