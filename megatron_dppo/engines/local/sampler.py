"""Sampling from logits with a generator of its own, and the records of allowed ids and routes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.types import MISSING_EXPERT, RoutingShape, SamplingMask, SamplingParams, with_weights


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


class SamplingMaskRecord:
    """What the filters left of each token of ``batch`` responses, in the order of the steps."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, rows: Tensor, distribution: Tensor) -> None:
        """Of one step: the log-probabilities ``[b, V]`` of ``rows [b]``, -inf where a filter cut."""
        is_kept = distribution > -torch.inf
        self._steps.append((rows, is_kept.sum(1), is_kept.nonzero()[:, 1].int()))

    def result(self) -> list[SamplingMask]:
        """Of each response, as many as it took part in steps."""
        rows, counts, ids = (torch.cat(parts) for parts in zip(*self._steps, strict=True))
        ids = ids[rows.repeat_interleave(counts).argsort(stable=True)]
        counts = counts[rows.argsort(stable=True)]
        steps = rows.bincount(minlength=self._batch).tolist()
        whole = SamplingMask(ids, counts.int().cpu())
        ends = list(accumulate(steps))
        return [whole[end - number : end] for end, number in zip(ends, steps, strict=True)]


class RouteRecorder:
    """Keeps the choices of the latest forward pass.

    Args:
        model: a causal language model of transformers whose routers (``layers[i].mlp.gate``) return
            ``(logits, weights [tokens, k], experts [tokens, k])``, as those of Qwen3-MoE and Qwen2-MoE do. The weights
            are what the outputs of the experts are multiplied by.
        shape: of that model.
    """

    def __init__(self, model: Any, shape: RoutingShape) -> None:
        self._shape = shape
        layers = enumerate(model.model.layers)
        self._routers = {i: layer.mlp.gate for i, layer in layers if i not in shape.dense_layers}
        self._chosen: dict[int, Tensor] = {}

    @contextmanager
    def watching(self, *, weights: bool = False) -> Iterator[None]:
        """Record inside, with or without the combine weights."""
        self._shape = replace(self._shape, weights=weights)
        handles = [
            router.register_forward_hook(lambda _module, _inputs, output, i=layer: self._keep(i, output[1], output[2]))
            for layer, router in self._routers.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, layer: int, weights: Tensor, experts: Tensor) -> None:
        routes = experts.to(self._shape.dtype)
        self._chosen[layer] = with_weights(routes, weights) if self._shape.weights else routes

    def take(self, batch: int) -> Tensor:
        """The choices of the latest forward pass over ``batch`` rows, ``[batch, tokens, L, k]``; dense layers missing.
        With weights ``[batch, tokens, L, width]``.

        Raises:
            RuntimeError: a router did not run.
        """
        if idle := self._routers.keys() - self._chosen.keys():
            raise RuntimeError(f"no choice of experts was seen in layers {sorted(idle)}; their routers did not run")
        first = next(iter(self._chosen.values()))
        tokens = first.shape[0] // batch
        missing = MISSING_EXPERT[self._shape.dtype]
        found = first.new_full((batch, tokens, self._shape.num_layers, self._shape.width), missing)
        layers = torch.tensor(sorted(self._chosen), device=first.device)
        together = torch.stack([self._chosen[i] for i in sorted(self._chosen)], 1)
        found[:, :, layers] = together.view(batch, tokens, len(layers), self._shape.width)
        self._chosen = {}
        return found


def combine_weights(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    """fp32 ``[tokens, k]`` of the ``experts [tokens, k]``, from the router's ``logits [tokens, E]``, by its own rule.

    A router with a bias (``e_score_correction_bias``) chooses by it, and weighs by sigmoids without it.
    """
    scores = logits.float()
    scores = scores.sigmoid() if hasattr(router, "e_score_correction_bias") else scores.softmax(-1)
    weights = scores.gather(1, experts.long())
    if router.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * getattr(router, "routed_scaling_factor", 1.0)
