from __future__ import annotations

import asyncio

import pytest

from megatron_dppo.errors import ServerError
from megatron_dppo_engines.server import Generation, InferenceServer
from tests.engines.calls import SHORT, ask, call
from tests.engines.checks import check_filters, check_logprobs, check_stop, check_topk
from tests.engines.servers import Engine
from tests.engines.tiny import ROUTING, SPECIAL, Reference, byte_tokenizer, difference


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_equal_those_of_transformers_at_the_sampling_temperature(
    vllm: Engine, old_model: Reference, temperature: float
) -> None:
    check_logprobs(vllm, old_model, temperature)


def test_topk_has_the_most_probable_tokens_and_always_the_sampled_one(vllm: Engine, old_model: Reference) -> None:
    check_topk(vllm, old_model)


def test_generation_stops_after_a_token_of_the_request(vllm: Engine) -> None:
    check_stop(vllm)


def test_evaluation_filters_are_applied(vllm: Engine) -> None:
    check_filters(vllm)


def test_abort_returns_the_tokens_so_far_and_ignores_requests_with_a_longer_id(
    vllm: Engine, old_model: Reference
) -> None:
    # Greedy decoding of this model does not end by itself.
    aborted, other = ask(SHORT, 1500, temperature=0, topk=3), ask(SHORT, 300, temperature=0)
    object.__setattr__(aborted, "request_id", "a")
    object.__setattr__(other, "request_id", "a1")

    async def use(server: InferenceServer) -> tuple[Generation, Generation]:
        tasks = [asyncio.create_task(server.generate(request)) for request in (aborted, other)]
        await server.generate(ask(SHORT, 8, temperature=0))  # both have tokens when it ends
        await server.abort("a")
        return await tasks[0], await tasks[1]

    first, second = call(vllm, use)
    assert first.finish_reason == "abort" and 0 < len(first.token_ids) < 1500
    assert second.finish_reason == "length" and len(second.token_ids) == 300
    expected = old_model.logprobs(SHORT, first.token_ids.tolist(), 1.0)
    assert difference(first.logprobs, expected) < 1e-5
    assert first.topk_token_ids is not None and first.topk_token_ids.shape == (len(first.token_ids), 4)


def test_all_requests_can_be_aborted(vllm: Engine) -> None:
    async def use(server: InferenceServer) -> set[str]:
        tasks = [asyncio.create_task(server.generate(ask(SHORT, 1500, temperature=0))) for _ in range(8)]
        while not all(task.done() for task in tasks):  # some may not have arrived at the first call
            await asyncio.sleep(0.5)
            await server.abort()
        return {task.result().finish_reason for task in tasks}

    assert call(vllm, use) == {"abort"}  # greedy decoding of this model does not end by itself


def test_server_info_is_parsed(vllm: Engine, old_model: Reference) -> None:
    async def use(server: InferenceServer) -> None:
        info = await server.info()
        assert (info.engine, info.world_size, info.max_context) == ("vllm", 1, 2048)
        assert info.engine_version == "0.32.0" and info.model == str(old_model.folder)
        assert info.policy_version == -1
        assert await server.health()
        assert await server.tokenize("a b") == tuple(byte_tokenizer(SPECIAL).encode("a b"))

    call(vllm, use)


def test_a_server_without_routed_experts_is_reported_with_its_flag(vllm: Engine) -> None:
    with pytest.raises(ServerError, match=r"choices\[0\]\.routed_experts is missing: .*--enable-return-routed-experts"):
        call(vllm, lambda server: server.generate(ask(SHORT, 5, routing=ROUTING)))


def test_a_server_that_reports_fewer_top_tokens_is_reported_with_its_flag(plain_vllm: Engine) -> None:
    with pytest.raises(ServerError, match=r"--max-logprobs 31 or more"):
        call(plain_vllm, lambda server: server.generate(ask(SHORT, 5, topk=30)))
