from __future__ import annotations

import asyncio

import pytest
import torch

from megatron_dppo.rollout.server import Generation
from megatron_dppo.rollout.sglang import SGLangServer
from megatron_dppo.types import VersionSpan
from tests.engines.calls import LONG, SHORT, ask, call
from tests.engines.servers import Engine
from tests.engines.tiny import END, ROUTING, SPECIAL, TOP_K, Reference, byte_tokenizer


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_equal_those_of_transformers_at_the_sampling_temperature(
    sglang: Engine, old_model: Reference, temperature: float
) -> None:
    requests = [ask(prompt, 40, temperature=temperature) for prompt in (SHORT, LONG, SHORT)]

    async def use(server: SGLangServer) -> list[Generation]:
        return await asyncio.gather(*(server.generate(request) for request in requests))

    for request, answer in zip(requests, call(sglang, use), strict=True):
        # Greedy decoding reports the unscaled distribution.
        expected = old_model.logprobs(request.token_ids, answer.token_ids, temperature or 1.0)
        assert len(answer.token_ids) == 40 or answer.token_ids[-1] == END
        assert answer.finish_reason == ("stop" if answer.token_ids[-1] == END else "length")
        assert answer.versions == (VersionSpan(-1, 0, len(answer.token_ids)),)
        torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-5, rtol=0)


def test_topk_has_the_most_probable_tokens_and_always_the_sampled_one(sglang: Engine, old_model: Reference) -> None:
    request = ask(SHORT, 120, temperature=0.7, topk=5)
    answer = call(sglang, lambda server: server.generate(request))
    assert answer.topk_token_ids is not None and answer.topk_logprobs is not None
    expected = old_model.distributions(SHORT, answer.token_ids, 0.7)
    values, ids = expected.topk(5)
    torch.testing.assert_close(answer.topk_logprobs[:, :5], values, atol=1e-5, rtol=0)
    same = answer.topk_token_ids[:, :5] == ids
    # Two tokens may trade places where they are equally probable.
    assert (same | ((expected.gather(1, answer.topk_token_ids[:, :5].long()) - values).abs() < 1e-5)).all()
    sampled = torch.tensor(answer.token_ids)[:, None]
    outside = ~(answer.topk_token_ids[:, :5] == sampled).any(1)
    assert outside.any() and not outside.all(), "the case needs sampled tokens inside and outside of the Top-K"
    assert torch.equal(answer.topk_token_ids[:, 5], torch.where(outside, sampled.squeeze(1), -1).int())
    logprobs = torch.tensor(answer.logprobs)
    torch.testing.assert_close(answer.topk_logprobs[:, 5], torch.where(outside, logprobs, 0.0), atol=0, rtol=0)
    assert (answer.topk_token_ids == sampled).sum(1).eq(1).all()


def test_routed_experts_are_the_most_probable_ones_of_transformers_from_the_wanted_position_on(
    sglang: Engine, old_model: Reference
) -> None:
    whole = ask(LONG, 20, routing=ROUTING)
    answer = call(sglang, lambda server: server.generate(whole))
    expected = old_model.experts([*LONG, *answer.token_ids])[:-1]
    assert answer.routed_experts is not None and answer.routed_experts.dtype == torch.uint8
    assert torch.equal(answer.routed_experts.long(), expected)
    rest = ask((*LONG, *answer.token_ids), 5, routing=ROUTING, routing_start=len(LONG) + 19)
    continued = call(sglang, lambda server: server.generate(rest))
    expected = old_model.experts([*rest.token_ids, *continued.token_ids])[len(LONG) + 19 : -1]
    assert continued.routed_experts is not None and continued.routed_experts.shape[2] == TOP_K
    assert torch.equal(continued.routed_experts.long(), expected)


def test_generation_stops_after_a_token_of_the_request(sglang: Engine, old_model: Reference) -> None:
    greedy = call(sglang, lambda server: server.generate(ask(SHORT, 12, temperature=0)))
    stop = greedy.token_ids[5]
    answer = call(sglang, lambda server: server.generate(ask(SHORT, 12, temperature=0, stop=(stop,))))
    assert answer.finish_reason == "stop"
    assert answer.token_ids == greedy.token_ids[: greedy.token_ids.index(stop) + 1]


def test_abort_returns_the_tokens_so_far_and_leaves_requests_with_a_longer_name_alone(
    sglang: Engine, old_model: Reference
) -> None:
    aborted, other = ask(SHORT, 1500, routing=ROUTING, topk=3), ask(SHORT, 60)
    # SGLang by itself aborts every request whose id starts with the given one.
    object.__setattr__(aborted, "request_id", "a")
    object.__setattr__(other, "request_id", "a1")

    async def use(server: SGLangServer) -> tuple[Generation, Generation]:
        tasks = [asyncio.create_task(server.generate(request)) for request in (aborted, other)]
        await asyncio.sleep(0.05)
        await server.abort("a")
        return await tasks[0], await tasks[1]

    for _ in range(8):  # a random response may end by itself
        first, second = call(sglang, use)
        if first.finish_reason == "abort" and first.token_ids:
            break
    assert first.finish_reason == "abort" and 0 < len(first.token_ids) < 1500
    assert second.finish_reason in ("stop", "length")
    expected = old_model.logprobs(SHORT, first.token_ids, 1.0)
    torch.testing.assert_close(torch.tensor(first.logprobs), expected, atol=1e-5, rtol=0)
    assert first.topk_token_ids is not None and first.topk_token_ids.shape == (len(first.token_ids), 4)
    assert first.routed_experts is not None
    assert torch.equal(first.routed_experts.long(), old_model.experts([*SHORT, *first.token_ids])[:-1])


def test_the_server_says_what_it_is(sglang: Engine, old_model: Reference) -> None:
    async def use(server: SGLangServer) -> None:
        info = await server.info()
        assert (info.engine, info.world_size, info.max_context) == ("sglang", 1, 2048)
        assert info.engine_version.startswith("0.5.2") and info.model == str(old_model.folder)
        assert info.policy_version == -1
        assert await server.health()
        assert await server.tokenize("a b") == tuple(byte_tokenizer(SPECIAL).encode("a b"))

    call(sglang, use)
