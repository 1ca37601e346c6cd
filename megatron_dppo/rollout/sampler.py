"""Draws tokens from logits: temperature, filters, and a generator of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_dppo.types import SamplingParams


def filters_of(params: SamplingParams) -> list[Any]:
    """What is done to fp32 logits one after the other, each called with ``(None, scores)``; temperature above 0."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    filters: list[Any] = []
    if params.temperature != 1:
        filters.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        filters.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        filters.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        filters.append(MinPLogitsWarper(params.min_p))
    return filters


class Sampler:
    """Draws from logits by a generator of its own.

    The global generator stays alone: a rollout in a background thread must not move the random state that the trainer
    reads and sets (dropout, recomputation, checkpoints). Each step draws numbers for the whole batch, so that the
    tokens of a row do not depend on when its neighbours finish.

    Args:
        params: temperature 0 takes the most probable token and the log-probabilities of the unchanged logits. Else
            temperature comes first, then top-k, then top-p of what that leaves, then min-p.
        generator: on the device of the logits.
        batch: rows of the batch at its start.
        unrecorded_top_p: a filter of the draws that the log-probabilities do not show (``rollout.perturbation``).
        reveals: the log-probabilities show it after all: the same draws, told as they were made.
    """

    def __init__(
        self,
        params: SamplingParams,
        generator: torch.Generator,
        batch: int,
        *,
        unrecorded_top_p: float = 1.0,
        reveals: bool = False,
    ) -> None:
        from transformers import TopPLogitsWarper

        self._generator, self._batch, self._greedy = generator, batch, params.temperature == 0
        self._filters = [] if self._greedy else filters_of(params)
        self._hidden = TopPLogitsWarper(unrecorded_top_p) if unrecorded_top_p < 1 else None
        if reveals and self._hidden is not None and not self._greedy:
            self._filters.append(self._hidden)
            self._hidden = None

    def __call__(self, logits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The token of each row ``[b]`` and the log-probabilities ``[b, V]`` of all.

        Args:
            logits: ``[b, V]`` of the rows that are left.
            rows: ``[b]`` their places in the whole batch.
        """
        scores = logits.float()
        for filtered in self._filters:
            scores = filtered(None, scores)
        logprobs = scores.log_softmax(-1)
        if self._greedy:
            return scores.argmax(-1), logprobs
        # The race of exponential clocks, as torch.multinomial runs it: the first to ring is i with probability p_i.
        clocks = scores.new_empty(self._batch, scores.shape[1]).exponential_(generator=self._generator)
        if len(rows) < self._batch:
            clocks = clocks[rows]
        if self._hidden is not None:
            scores = self._hidden(None, scores)
        return scores.softmax(-1).div_(clocks).argmax(-1), logprobs
