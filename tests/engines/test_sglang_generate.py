from __future__ import annotations

import asyncio

import pytest
import torch

from megatron_dppo_engines.server import Generation, InferenceServer
from tests.engines.calls import LONG, SHORT, ask, call
from tests.engines.checks import check_filters, check_logprobs, check_stop, check_topk
from tests.engines.servers import Engine
from tests.engines.tiny import LAYERS, ROUTING, SPECIAL, TOP_K, Reference, byte_tokenizer, difference


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_equal_those_of_transformers_at_the_sampling_temperature(
    sglang: Engine, old_model: Reference, temperature: float
) -> None:
    check_logprobs(sglang, old_model, temperature)


def test_topk_has_the_most_probable_tokens_and_always_the_sampled_one(sglang: Engine, old_model: Reference) -> None:
    check_topk(sglang, old_model)


def test_routed_experts_equal_those_of_transformers_from_the_requested_position(
    sglang: Engine, old_model: Reference
) -> None:
    full_request = ask(LONG, 20, routing=ROUTING)
    answer = call(sglang, lambda server: server.generate(full_request))
    assert answer.routed_experts is not None and answer.routed_experts.dtype == torch.uint8
    assert len(answer.routed_experts) == len(LONG) + len(answer.token_ids) - 1
    old_model.check_experts(answer.routed_experts, [*LONG, *answer.token_ids.tolist()])
    continuation = ask((*LONG, *answer.token_ids.tolist()), 5, routing=ROUTING, routing_start=len(LONG) + 19)
    continued = call(sglang, lambda server: server.generate(continuation))
    start, full_length = len(LONG) + 19, len(continuation.token_ids) + len(continued.token_ids)
    assert continued.routed_experts is not None
    assert continued.routed_experts.shape == (full_length - 1 - start, LAYERS, TOP_K)
    old_model.check_experts(continued.routed_experts, [*continuation.token_ids, *continued.token_ids.tolist()], start)


def test_generation_stops_after_a_token_of_the_request(sglang: Engine) -> None:
    check_stop(sglang)


def test_evaluation_filters_are_applied(sglang: Engine) -> None:
    check_filters(sglang)


def test_abort_returns_the_tokens_so_far_and_ignores_requests_with_a_longer_id(
    sglang: Engine, old_model: Reference
) -> None:
    # Greedy decoding of this model does not end by itself.
    aborted = ask(SHORT, 1500, temperature=0, routing=ROUTING, topk=3)
    other = ask(SHORT, 300, temperature=0)
    # SGLang by itself aborts every request whose id starts with the given one.
    object.__setattr__(aborted, "request_id", "a")
    object.__setattr__(other, "request_id", "a1")

    async def use(server: InferenceServer) -> tuple[Generation, Generation]:
        tasks = [asyncio.create_task(server.generate(request)) for request in (aborted, other)]
        await server.generate(ask(SHORT, 8, temperature=0))  # both have tokens when it ends
        await server.abort("a")
        return await tasks[0], await tasks[1]

    first, second = call(sglang, use)
    assert first.finish_reason == "abort" and 0 < len(first.token_ids) < 1500
    assert second.finish_reason == "length" and len(second.token_ids) == 300
    expected = old_model.logprobs(SHORT, first.token_ids.tolist(), 1.0)
    assert difference(first.logprobs, expected) < 1e-5
    assert first.topk_token_ids is not None and first.topk_token_ids.shape == (len(first.token_ids), 4)
    assert first.routed_experts is not None and len(first.routed_experts) == len(SHORT) + len(first.token_ids) - 1
    old_model.check_experts(first.routed_experts, [*SHORT, *first.token_ids.tolist()])


def test_server_info_is_parsed(sglang: Engine, old_model: Reference) -> None:
    async def use(server: InferenceServer) -> None:
        info = await server.info()
        assert (info.engine, info.world_size, info.max_context) == ("sglang", 1, 2048)
        assert info.engine_version.startswith("0.5.2") and info.model == str(old_model.folder)
        assert info.policy_version == -1
        assert await server.health()
        assert await server.tokenize("a b") == tuple(byte_tokenizer(SPECIAL).encode("a b"))

    call(sglang, use)
