"""Log-probabilities of given tokens under a transformers model, with recorded experts and combine weights."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_dppo.engines.local.engine import LocalEngine
from megatron_dppo.engines.local.sampler import (
    LINEAR_ATTENTION,
    build_filters,
    combine_weights,
    linear_attention_layers,
    routers_by_layer,
)
from megatron_dppo.types import (
    MISSING_EXPERT,
    RoutingShape,
    SamplingMask,
    SamplingParams,
    TrainingSample,
    select_experts,
    select_weights,
)
from megatron_dppo.types.model_folder import HfConfig


class TokenByToken(nn.Module):
    """Linear attention that reads some tokens at once and every later one alone, with the state before it."""

    def __init__(self, layer: nn.Module, hf_config: HfConfig) -> None:
        super().__init__()
        self._layer = layer
        self._hf_config = hf_config
        self.num_at_once = 1
        """Number of tokens that are read at once."""

    def forward(self, hidden_states: Tensor, **_: object) -> Tensor:
        """Compute the layer for one sequence ``[1, T, hidden_size]`` without padding."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self._hf_config)
        at_once = min(self.num_at_once, hidden_states.shape[1])
        parts = hidden_states.split([at_once] + [1] * (hidden_states.shape[1] - at_once), dim=1)
        return torch.cat([self._layer(hidden_states=part, cache_params=cache) for part in parts], dim=1)


@contextmanager
def decoding_linear_attention(model: Any) -> Iterator[Callable[[int], None]]:
    """Compute linear attention token by token, and yield a function that sets how many are read at once next."""
    layers = linear_attention_layers(model)
    originals = [getattr(layer, LINEAR_ATTENTION) for layer in layers]
    wrappers = [TokenByToken(original, model.config) for original in originals]

    def read_at_once(num_tokens: int) -> None:
        for wrapper in wrappers:
            wrapper.num_at_once = num_tokens

    try:
        for layer, wrapper in zip(layers, wrappers, strict=True):
            setattr(layer, LINEAR_ATTENTION, wrapper)
        yield read_at_once
    finally:
        for layer, original in zip(layers, originals, strict=True):
            setattr(layer, LINEAR_ATTENTION, original)


class ForcedRoutes:
    """Replay of recorded experts, and of their combine weights, in the routers of a model."""

    def __init__(self, model: Any, shape: RoutingShape) -> None:
        self._shape = shape
        self._routers = routers_by_layer(model, shape)

    @contextmanager
    def replaying(self, routes: Tensor) -> Iterator[None]:
        """Send the T tokens of each forward pass in a ``with`` block to ``routes [T, L, width]``.

        Missing routes keep the router's live choice.
        """
        handles = [
            router.register_forward_hook(
                lambda _router, _inputs, output, layer=routes[:, i]: self._replace(output, layer)
            )
            for i, router in self._routers.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _replace(self, output: tuple[Tensor, Tensor, Tensor], layer_routes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the router's ``(logits [T, E], weights [T, k], experts [T, k])`` with ``layer_routes [T, width]``."""
        logits, live_weights, live = output
        recorded = select_experts(layer_routes, self._shape).to(live.device)
        is_recorded = recorded != MISSING_EXPERT[recorded.dtype]
        experts = torch.where(is_recorded, recorded.to(live.dtype), live)
        # Recorded experts get the live router's weights, unless weights are recorded too (NaN = not recorded).
        weights = combine_weights(self._shape, logits, experts)
        weights = torch.where(is_recorded, weights.to(live_weights.dtype), live_weights)
        if self._shape.weights:
            values = select_weights(layer_routes, self._shape).to(live.device)
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
    token_by_token: bool = False,
) -> list[Tensor]:
    """Return the fp32 log-probabilities ``[T]`` of the labels of each sample, in one pass over its complete sequence.

    The softmax is over the samples' sampling masks, if they have any. ``forced`` replays their routes. ``fp32_head``
    computes the output layer in fp32, on the hidden states and weights as they are. ``token_by_token`` reads the
    response one token at a time in linear attention, as decoding does.
    """
    device = next(model.parameters()).device
    results = []
    with decoding_linear_attention(model) if token_by_token else nullcontext() as read_at_once:
        for sample in samples:
            tokens = sample.tokens[None].to(device)
            if read_at_once is not None:
                # The first token with a loss is the label of the last one before it.
                read_at_once(int(sample.loss_mask.int().argmax()) + 1)
            routes = sample.routed_experts
            with nullcontext() if forced is None or routes is None else forced.replaying(routes):
                hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[0]
            weight = model.lm_head.weight
            logits = hidden.float() @ weight.float().T if fp32_head else model.lm_head(hidden)
            scores = logits.float() if temperature == 1 else logits.float() / temperature
            if sample.sampling_mask is not None:
                scores = _apply_sampling_mask(scores, sample.sampling_mask)
            logprobs = scores.log_softmax(-1).gather(1, sample.labels.to(device)[:, None])[:, 0]
            results.append(logprobs.cpu())
    return results


def rescore_by_engine(
    engine: LocalEngine,
    samples: Sequence[TrainingSample],
    temperature: float,
    *,
    fp32_head: bool = False,
    token_by_token: bool = False,
) -> list[Tensor]:
    """Return the log-probabilities ``[T]`` of the labels of each sample under an engine's copy; see ``rescore``.

    Samples with routes are replayed.
    """

    def score(model: Any, routing: RoutingShape | None) -> list[Tensor]:
        # The routes of a call have one format: with combine weights or without.
        routes = samples[0].routed_experts if samples else None
        forced = None
        if routing is not None and routes is not None:
            forced = ForcedRoutes(model, replace(routing, weights=routes.shape[-1] > routing.topk))
        return rescore(
            model, samples, temperature=temperature, forced=forced, fp32_head=fp32_head, token_by_token=token_by_token
        )

    return engine.call_with_model(score)


@torch.no_grad()
def with_filter(model: Any, sample: TrainingSample, params: SamplingParams, responses: int) -> TrainingSample:
    """Return a sample with the sampling mask that the filters of ``params`` give on the model's own distributions.

    The labels, of the last ``responses`` tokens, are always allowed.
    """
    device = next(model.parameters()).device
    scores = model(input_ids=sample.tokens[None].to(device), use_cache=False).logits[0, -responses:].float()
    for apply_filter in build_filters(params):
        scores = apply_filter(None, scores)
    is_allowed = scores > -torch.inf
    is_allowed.scatter_(1, sample.labels[-responses:, None].to(device), True)
    sampling_mask = SamplingMask(is_allowed.nonzero()[:, 1].int().cpu(), is_allowed.sum(1).int().cpu())
    return replace(sample, sampling_mask=sampling_mask)


def _apply_sampling_mask(scores: Tensor, sampling_mask: SamplingMask) -> Tensor:
    """Return ``[T, V]`` scores with -inf outside the sampling mask, which covers the last tokens.

    A token with an empty set keeps its complete distribution.
    """
    first = len(scores) - len(sampling_mask)
    is_unfiltered = torch.cat([torch.ones(first, dtype=torch.bool), sampling_mask.counts == 0]).to(scores.device)
    is_allowed = is_unfiltered[:, None].expand_as(scores).clone()
    rows = first + torch.arange(len(sampling_mask)).repeat_interleave(sampling_mask.counts.long())
    is_allowed[rows.to(scores.device), sampling_mask.ids.long().to(scores.device)] = True
    return scores.masked_fill(~is_allowed, -torch.inf)
