"""Probing a real server, with transformers as the trainer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from megatron_dppo.weights.probe_requests import (
    ProbeExpectation,
    ProbeResponse,
    RouteCounts,
    TrainerReading,
    send_probe,
)
from megatron_dppo.weights.verdict import ProbeResult, verify_response
from megatron_dppo_engines.route_checks import count_differences
from megatron_dppo_engines.server import Generation, InferenceServer
from tests.distributed.sampling_masks import keep
from tests.engines.calls import call
from tests.engines.servers import Engine
from tests.engines.tiny import END, SPECIAL, TOP_K, Reference, byte_tokenizer

TEXT = "One request before the run starts. " * 6


def expectation(**changes: object) -> ProbeExpectation:
    ids = tuple(byte_tokenizer(SPECIAL).encode(TEXT))
    base = ProbeExpectation(
        prompt=TEXT,
        prompt_token_ids=ids,
        vocab_size=512,
        end_tokens=(END,),
        temperature=0.7,
        dtype="fp32",
        topk_logprobs=4,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def read(generation: Generation, expected: ProbeExpectation, model: Reference) -> TrainerReading:
    """Compute the trainer's values with transformers; the server's experts are compared, not replayed."""
    prompt, response = expected.prompt_token_ids, generation.token_ids.tolist()
    at_t, raw = (
        keep(model.distributions(prompt, response, t).double(), generation.sampling_mask)
        for t in (expected.temperature, 1.0)
    )
    tokens = torch.tensor(response)[:, None]
    assert generation.topk_token_ids is not None
    ids = generation.topk_token_ids[:, :-1].long().clamp(min=0)
    logprobs, routes = at_t.gather(1, tokens)[:, 0].numpy(), None
    if generation.routed_experts is not None:
        routes = RouteCounts(count_differences(generation.routed_experts, _live(prompt, response, model)).numpy())
    return TrainerReading(
        logprobs=logprobs,
        raw_logprobs=raw.gather(1, tokens)[:, 0].numpy(),
        topk_logprobs=at_t.gather(1, ids).numpy(),
        raw_topk_logprobs=raw.gather(1, ids).numpy(),
        best_logprobs=at_t.topk(ids.shape[1]).values.numpy(),
        routes=routes,
        replayed_logprobs=None if routes is None else logprobs,
    )


@torch.no_grad()
def _live(prompt: tuple[int, ...], response: list[int], model: Reference) -> torch.Tensor:
    output = model.model(torch.tensor([[*prompt, *response]]), output_router_logits=True)
    return torch.stack(output.router_logits, 1)[:-1].topk(TOP_K, -1).indices.to(torch.uint8)


def run(engine: Engine, expected: ProbeExpectation, model: Reference) -> ProbeResult:
    async def use(server: InferenceServer) -> ProbeResponse:
        return await send_probe(server, expected)

    for _ in range(5):  # what transformers does not know of a sampled response is NaN, and a probe must judge all of it
        answer = call(engine, use)
        readings = [read(generation, expected, model) for generation in answer.generations]
        if not any(np.isnan(reading.raw_logprobs).any() for reading in readings):
            break
    return verify_response(answer, expected, readings)
