"""Log-probabilities of given tokens by a transformers model, with the experts and weights that routers once chose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.engines.local.sampler import combine_weights, filters_of
from megatron_dppo.types import (
    MISSING_EXPERT,
    RoutingShape,
    SamplingMask,
    SamplingParams,
    TrainingSample,
    experts_of,
    weights_of,
)


class ForcedRoutes:
    """Puts given experts, and their combine weights, in the place of what the routers of a model choose.

    Args:
        model: as that of a ``RouteRecorder``.
        shape: of the routes.
    """

    def __init__(self, model: Any, shape: RoutingShape) -> None:
        self._shape = shape
        layers = enumerate(model.model.layers)
        self._routers = {i: layer.mlp.gate for i, layer in layers if i not in shape.dense_layers}

    @contextmanager
    def using(self, routes: Tensor) -> Iterator[None]:
        """The tokens ``[T]`` of each forward pass inside visit ``routes [T, L, width]``; what is missing stays live."""
        handles = [
            router.register_forward_hook(lambda router, _, output, own=routes[:, i]: self._put(router, output, own))
            for i, router in self._routers.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _put(self, router: Any, output: tuple[Tensor, Tensor, Tensor], own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The router's ``(logits [T, E], weights [T, k], experts [T, k])`` with what is known of ``own [T, width]``."""
        logits, live_weights, live = output
        given = experts_of(own, self._shape).to(live.device)
        known = given != MISSING_EXPERT[given.dtype]
        experts = torch.where(known, given.to(live.dtype), live)
        weights = combine_weights(router, logits, experts)
        weights = torch.where(known, weights.to(live_weights.dtype), live_weights)
        if self._shape.weights:
            values = weights_of(own, self._shape).to(live.device)
            weights = torch.where(values.isnan(), weights, values.to(weights.dtype))
        return logits, weights, experts


@torch.no_grad()
def rescore(
    model: Any,
    samples: Sequence[TrainingSample],
    *,
    temperature: float,
    forced: ForcedRoutes | None = None,
    fp32_head: bool = False,
) -> list[Tensor]:
    """``[T]`` fp32 log-probabilities of the labels of each sample, in one pass over its whole sequence.

    Args:
        model: a causal language model of transformers.
        samples: with their sampling masks, which the softmax is over; with their routes, if ``forced`` is given.
        temperature: divides the logits.
        forced: replays the samples' routes; None = the routers are live.
        fp32_head: the output layer in fp32, on the hidden states and weights as they are.
    """
    device = next(model.parameters()).device
    found = []
    for sample in samples:
        tokens = sample.tokens[None].to(device)
        if forced is not None and sample.routed_experts is not None:
            with forced.using(sample.routed_experts):
                hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[0]
        else:
            hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[0]
        weight = model.lm_head.weight
        logits = hidden.float() @ weight.float().T if fp32_head else model.lm_head(hidden)
        scores = logits.float() if temperature == 1 else logits.float() / temperature
        if sample.sampling_mask is not None:
            scores = _cut(scores, sample)
        logprobs = scores.log_softmax(-1).gather(1, sample.labels.to(device)[:, None])[:, 0]
        found.append(logprobs.cpu())
    return found


@torch.no_grad()
def with_filter(model: Any, sample: TrainingSample, params: SamplingParams, responses: int) -> TrainingSample:
    """The sample with the sets that the filters of ``params`` leave of the model's own distributions, for its last
    ``responses`` tokens; the label is always left."""
    device = next(model.parameters()).device
    scores = model(input_ids=sample.tokens[None].to(device), use_cache=False).logits[0, -responses:].float()
    for cut in filters_of(params):
        scores = cut(None, scores)
    inside = scores > -torch.inf
    inside.scatter_(1, sample.labels[-responses:, None].to(device), True)
    sets = SamplingMask(inside.nonzero()[:, 1].int().cpu(), inside.sum(1).int().cpu())
    return replace(sample, sampling_mask=sets)


def _cut(scores: Tensor, sample: TrainingSample) -> Tensor:
    """``[T, V]`` with -inf outside the sampling masks, which those of the last tokens have."""
    sampling_mask = sample.sampling_mask
    assert sampling_mask is not None
    first = len(scores) - len(sampling_mask)
    whole = torch.cat([torch.ones(first, dtype=torch.bool), sampling_mask.counts == 0]).to(scores.device)
    allowed = whole[:, None].expand_as(scores).clone()
    rows = first + torch.arange(len(sampling_mask)).repeat_interleave(sampling_mask.counts.long())
    allowed[rows.to(scores.device), sampling_mask.ids.long().to(scores.device)] = True
    return scores.masked_fill(~allowed, -torch.inf)
