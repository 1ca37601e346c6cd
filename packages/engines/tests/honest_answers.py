"""Answers that keep the contract, made from logits by NumPy, and the lies that were seen or thought of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megatron_dppo_engines.responses import SamplingParams, VersionSpan
from megatron_dppo_engines.routes import RoutingShape
from megatron_dppo_engines.server import Echo, GenerateRequest, Generation
from megatron_dppo_engines.servers.contract import Contract

VOCAB, END, OTHER_END = 50, 2, 7
CONTRACT = Contract(vocab_size=VOCAB, end_tokens=(END, OTHER_END))
SHAPE = RoutingShape(num_layers=3, num_experts=8, topk=2)
LENGTH = 12
"""tokens of an answer"""


def honest(
    seed: int = 0, *, topk: int = 4, routed: bool = True, reason: str = "length", sharp: float = 2.0
) -> tuple[GenerateRequest, Generation]:
    """A request and an answer to it, which ends for ``reason``."""
    rng = np.random.default_rng(seed)
    prompt = tuple(int(token) for token in rng.integers(8, VOCAB, 5))
    logits = rng.normal(size=(LENGTH, VOCAB)) * sharp
    logits[:, :8] -= 60  # end tokens are drawn below
    probabilities = np.exp(logits - logits.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    tokens = [int(rng.choice(VOCAB, p=row)) for row in probabilities]
    if reason == "stop":
        tokens[-1] = END
    # No sampled token has a probability that float32 rounds to 0.
    logprobs = np.log(np.maximum(probabilities, np.finfo(np.float32).smallest_subnormal)).astype(np.float32)
    sampled = logprobs[np.arange(LENGTH), tokens]
    order = np.argsort(-logprobs, axis=1)
    ids, values = order[:, :topk], np.take_along_axis(logprobs, order[:, :topk], 1)
    inside = (ids == np.array(tokens)[:, None]).any(1)
    last = (np.where(inside, -1, tokens)[:, None], np.where(inside, 0.0, sampled)[:, None])
    rows = len(prompt) + LENGTH - 1
    routes = np.stack([[rng.permutation(8)[:2] for _ in range(3)] for _ in range(rows)]).astype(np.uint8)
    request = GenerateRequest(
        request_id="r1",
        token_ids=prompt,
        params=SamplingParams(max_new_tokens=LENGTH if reason == "length" else 40, topk_logprobs=topk),
        routing=SHAPE if routed else None,
    )
    generation = Generation(
        token_ids=torch.tensor(tokens, dtype=torch.int32),
        logprobs=torch.from_numpy(sampled),
        finish_reason=reason,  # type: ignore[arg-type]
        versions=(VersionSpan(3, 0, 5), VersionSpan(4, 5, LENGTH)),
        topk_token_ids=torch.from_numpy(np.concatenate([ids, last[0]], 1).astype(np.int32)) if topk else None,
        topk_logprobs=torch.from_numpy(np.concatenate([values, last[1]], 1).astype(np.float32)) if topk else None,
        routed_experts=torch.from_numpy(routes) if routed else None,
        echo=Echo(
            request_id="r1",
            prompt_token_ids=prompt,
            prompt_length=len(prompt),
            response_length=LENGTH,
            matched_stop=END if reason == "stop" else None,
            best_token_ids=order[:, 0].astype(np.int32),
            best_logprobs=logprobs[np.arange(LENGTH), order[:, 0]],
        ),
    )
    return request, generation


Change = Callable[[Generation], Generation]


def put(field: str, place: int, value: Any) -> Change:
    """One value of a column."""

    def change(given: Generation) -> Generation:
        values = getattr(given, field).clone()
        values[place] = value
        return replace(given, **{field: values})

    return change


def says(**changes: Any) -> Change:
    """Another echo."""
    return lambda given: replace(given, echo=replace(given.echo, **changes))  # type: ignore[type-var]


def table(field: str, change: Callable[[torch.Tensor], Any]) -> Change:
    """Another Top-K or other routes: ``change`` works in place, or returns a tensor."""

    def apply(given: Generation) -> Generation:
        values = getattr(given, field).clone()
        result = change(values)
        return replace(given, **{field: values if result is None else result})

    return apply


def scaled(given: Generation) -> Generation:
    """All Top-K values x 0.7, the sampled token's left alone."""
    assert given.topk_logprobs is not None
    values = given.topk_logprobs * 0.7
    values[:, -1] = given.topk_logprobs[:, -1]
    return replace(given, topk_logprobs=values)


def shifted_topk(given: Generation) -> Generation:
    """The K most probable tokens of each position one position late, as a client would put them together."""
    assert given.topk_token_ids is not None and given.topk_logprobs is not None
    ids, values = given.topk_token_ids[:, :-1].roll(1, 0), given.topk_logprobs[:, :-1].roll(1, 0)
    sampled, logprobs = given.token_ids[:, None], given.logprobs[:, None]
    outside = ~(ids == sampled).any(1, keepdim=True)
    ids = torch.cat([ids, torch.where(outside, sampled, -1).int()], 1)
    values = torch.cat([values, torch.where(outside, logprobs, 0.0)], 1)
    return replace(given, topk_token_ids=ids, topk_logprobs=values)


def shifted_logprobs(given: Generation) -> Generation:
    """The log-probabilities one position late; the Top-K's own copy of them too."""
    logprobs = given.logprobs.roll(1)
    if given.topk_token_ids is None or given.topk_logprobs is None:
        return replace(given, logprobs=logprobs)
    values = given.topk_logprobs.clone()
    used = given.topk_token_ids[:, -1] >= 0
    values[used, -1] = logprobs[used]
    return replace(given, logprobs=logprobs, topk_logprobs=values)


def truncated(given: Generation) -> Generation:
    """Two tokens fewer, with everything that belongs to them, by a proxy that mends every count."""
    keep = len(given.token_ids) - 2
    return replace(
        given,
        token_ids=given.token_ids[:keep],
        logprobs=given.logprobs[:keep],
        versions=(VersionSpan(3, 0, keep),),
        topk_token_ids=None if given.topk_token_ids is None else given.topk_token_ids[:keep],
        topk_logprobs=None if given.topk_logprobs is None else given.topk_logprobs[:keep],
        routed_experts=None if given.routed_experts is None else given.routed_experts[:-2],
        echo=replace(
            given.echo,  # type: ignore[type-var]
            response_length=keep,
            best_token_ids=given.echo.best_token_ids[:keep],  # type: ignore[union-attr,index]
            best_logprobs=given.echo.best_logprobs[:keep],  # type: ignore[union-attr,index]
        ),
    )
