"""Sampling from logits with a separate random generator, and recorders of allowed ids and routes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module

from megatron_dppo.types import MISSING_EXPERT, RoutingShape, SamplingMask, SamplingParams, with_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LINEAR_ATTENTION = "linear_attn"
"""Name of linear attention in the decoder layers of transformers that have it."""
LARGEST_RACE = 1 << 22
"""Largest number of probabilities of a step that race. Beyond it, random numbers would take most of the time."""
INVERSION_BLOCK = 1 << 20
"""Probabilities whose sums are in memory at a time. They stay in the cache of a core."""


def build_filters(params: SamplingParams) -> list[Callable[[None, Tensor], Tensor]]:
    """Return the transforms of fp32 logits, in order, called with ``(None, scores)``, for a temperature above 0."""
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
    """Sampler with a separate random generator.

    It does not use the global generator: a rollout in a background thread must not change the random state that the
    trainer reads and sets (dropout, recomputation, checkpoints). Each step draws numbers for the complete batch, so
    that the tokens of a row do not depend on when other rows finish. ``first_row`` is the index in this batch of the
    first row, if the logits are those of a part of the batch.

    At temperature 0 it returns the most probable token and the log-probabilities of the unchanged logits. Otherwise it
    applies temperature, top-k, top-p and min-p, in this order. Log-probabilities do not include the unrecorded filter
    and factor of the temperature, but for the filter with ``reveals_hidden_filter``: the samples stay the same.
    """

    def __init__(
        self,
        params: SamplingParams,
        generator: torch.Generator,
        batch: int,
        *,
        first_row: int = 0,
        unrecorded_top_p: float = 1.0,
        unrecorded_temperature: float = 1.0,
        reveals_hidden_filter: bool = False,
    ) -> None:
        from transformers import TopPLogitsWarper

        self._generator = generator
        self._batch = batch
        self._first_row = first_row
        self._is_greedy = params.temperature == 0
        self._filters = [] if self._is_greedy else build_filters(params)
        self._hidden_temperature = unrecorded_temperature
        self._hidden_filter = TopPLogitsWarper(unrecorded_top_p) if unrecorded_top_p < 1 else None
        if reveals_hidden_filter and self._hidden_filter is not None and not self._is_greedy:
            # Moves from the samples alone to samples and log-probabilities.
            self._filters.append(self._hidden_filter)
            self._hidden_filter = None

    def __call__(self, logits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return a token for each row, [b], and the log-probabilities of all tokens, [b, V].

        ``rows`` are the indices of the rows that are left, counted from ``first_row``, [b].
        """
        scores = logits.float()
        for apply_filter in self._filters:
            scores = apply_filter(None, scores)
        logprobs = scores.log_softmax(-1)
        if self._is_greedy:
            return scores.argmax(-1), logprobs
        if self._hidden_temperature != 1:
            scores = scores / self._hidden_temperature
        if self._hidden_filter is not None:
            scores = self._hidden_filter(None, scores)
        is_large = self._batch * scores.shape[1] > LARGEST_RACE
        return (self._invert if is_large else self._race)(scores, rows), logprobs

    def _race(self, scores: Tensor, rows: Tensor) -> Tensor:
        """Sample by an exponential race, as in torch.multinomial: one random number for each entry.

        The argmax of p_i / e_i is i with probability p_i for e_i ~ Exp(1).
        """
        clocks = scores.new_empty(self._batch, scores.shape[1]).exponential_(generator=self._generator)
        if len(rows) < self._batch:
            clocks = clocks[self._first_row + rows]
        return scores.softmax(-1).div_(clocks).argmax(-1)

    def _invert(self, scores: Tensor, rows: Tensor) -> Tensor:
        """Sample by inversion of the cumulative distribution: one random number for each row."""
        uniform = torch.rand(self._batch, 1, dtype=torch.float64, device=scores.device, generator=self._generator)
        size = max(1, INVERSION_BLOCK // scores.shape[1])
        tokens = []
        for block, draws in zip(scores.split(size), uniform[self._first_row + rows].split(size), strict=True):
            # In fp64: sums in fp32 would be too coarse for improbable tokens.
            sums = block.softmax(-1).cumsum(-1, dtype=torch.float64)
            total = sums[:, -1:]
            # Rounding must not reach the total, behind which there is no token.
            threshold = torch.minimum(draws * total, total.nextafter(torch.zeros_like(total)))
            # The first sum above the threshold, so never a token of probability 0.
            tokens.append(torch.searchsorted(sums, threshold, right=True))
        # NaN among the scores gives the last token, as any other.
        return torch.cat(tokens).squeeze(1).clamp_(max=scores.shape[1] - 1)


class SamplingMaskRecord:
    """Recorder of the ids that the filters allow for each token of ``batch`` responses."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, rows: Tensor, distribution: Tensor) -> None:
        """Record one step of ``rows [b]``: log-probabilities ``[b, V]``, -inf where a filter removed the id."""
        is_allowed = distribution > -torch.inf
        self._steps.append((rows, is_allowed.sum(1), is_allowed.nonzero()[:, 1].int()))

    def result(self) -> list[SamplingMask]:
        """Return the sampling mask of each response, with one set for each of its steps."""
        # Steps come first in the record. Stable sorts by row put the steps of each response together, in order.
        rows, counts, ids = (torch.cat(parts) for parts in zip(*self._steps, strict=True))
        ids = ids[rows.repeat_interleave(counts).argsort(stable=True)]
        counts = counts[rows.argsort(stable=True)]
        steps = rows.bincount(minlength=self._batch).tolist()
        all_rows = SamplingMask(ids, counts.int().cpu())
        ends = list(accumulate(steps))
        return [all_rows[end - number : end] for end, number in zip(ends, steps, strict=True)]


def linear_attention_layers(model: PreTrainedModel) -> list[Module]:
    """Return the decoder layers of a transformers causal language model that have linear attention."""
    return [layer for layer in model.model.layers if hasattr(layer, LINEAR_ATTENTION)]


def routers_by_layer(model: PreTrainedModel, shape: RoutingShape) -> dict[int, Module]:
    """Return the routers of a transformers model by layer. They are named ``gate``, or ``router`` in gpt-oss."""
    mlps = {i: layer.mlp for i, layer in enumerate(model.model.layers) if i not in shape.dense_layers}
    return {i: mlp.router if hasattr(mlp, "router") else mlp.gate for i, mlp in mlps.items()}


class RouteRecorder:
    """Recorder of the experts that the routers of a transformers model choose in a forward pass.

    The routers (``routers_by_layer``) return ``(logits, weights [tokens, k], experts [tokens, k])``, as those of
    Qwen3-MoE and Qwen2-MoE do. The outputs of the experts are multiplied by the weights.
    """

    def __init__(self, model: Any, shape: RoutingShape) -> None:
        self._shape = shape
        self._routers = routers_by_layer(model, shape)
        self._routes_by_layer: dict[int, Tensor] = {}

    @contextmanager
    def recording(self, *, weights: bool = False) -> Iterator[None]:
        """Record forward passes in a ``with`` block; ``weights`` records the combine weights too."""
        self._shape = replace(self._shape, weights=weights)
        handles = [
            router.register_forward_hook(
                lambda _module, _inputs, output, i=layer: self._record(i, output[1], output[2])
            )
            for layer, router in self._routers.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _record(self, layer: int, weights: Tensor, experts: Tensor) -> None:
        routes = experts.to(self._shape.dtype)
        self._routes_by_layer[layer] = with_weights(routes, weights) if self._shape.weights else routes

    def pop_routes(self, batch: int) -> Tensor:
        """Return the routes of the latest forward pass over ``batch`` rows, and forget them.

        [batch, tokens, L, k], or [batch, tokens, L, width] with combine weights. Dense layers are marked as missing.
        """
        if idle := self._routers.keys() - self._routes_by_layer.keys():
            raise RuntimeError(f"no choice of experts was seen in layers {sorted(idle)}; their routers did not run")
        first = next(iter(self._routes_by_layer.values()))
        tokens = first.shape[0] // batch
        missing = MISSING_EXPERT[self._shape.dtype]
        routes = first.new_full((batch, tokens, self._shape.num_layers, self._shape.width), missing)
        layers = torch.tensor(sorted(self._routes_by_layer), device=first.device)
        stacked = torch.stack([self._routes_by_layer[i] for i in sorted(self._routes_by_layer)], 1)
        routes[:, :, layers] = stacked.view(batch, tokens, len(layers), self._shape.width)
        self._routes_by_layer = {}
        return routes


def combine_weights(shape: RoutingShape, logits: Tensor, experts: Tensor) -> Tensor:
    """Return the combine weights of given experts by the model's rule, fp32 [tokens, k].

    A router with a bias (``e_score_correction_bias``) chooses with it, and weighs by sigmoids without it.
    """
    scores = logits.float()
    scores = scores.sigmoid() if shape.has_sigmoid else scores.softmax(-1)
    weights = scores.gather(1, experts.long())
    if shape.weights_add_to_one:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * shape.weights_scale
