"""A real server that lies between probes: each lie is routed around, or ends the run, and the server is named."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

from megatron_dppo.errors import ServerError
from megatron_dppo_engines.server import GenerateRequest, Generation
from megatron_dppo_engines.servers.contract import Contract, checked
from megatron_dppo_engines.servers.pool import ServerPool
from megatron_dppo_engines.sglang import SGLangServer
from tests.engines.calls import SHORT, ask
from tests.engines.lies import LIES, generation_lie
from tests.engines.proxy import Proxy
from tests.engines.servers import Engine
from tests.engines.tiny import END, ROUTING, VOCAB

CONTRACT = Contract(vocab_size=VOCAB, end_tokens=(END,))


def over(urls: list[str], use: Callable[[ServerPool], Any], **more: Any) -> Any:
    """Run ``use`` with a pool of real servers, whatever weights they have."""

    async def run() -> Any:
        clients = [SGLangServer(url) for url in urls]
        settings = {"max_in_flight": 16, "health_seconds": 5.0, "unavailable_timeout_seconds": 1.0}
        pool = ServerPool(clients, checked(CONTRACT), **{**settings, **more})
        pool.use_version(-1, urls)
        pool.versions = [-1]
        try:
            return await use(pool)
        finally:
            for client in clients:
                await client.close()

    return asyncio.run(run())


async def answers(pool: ServerPool, requests: list[GenerateRequest]) -> list[Generation]:
    return await asyncio.gather(*(pool.generate(request, request.request_id) for request in requests))


@pytest.mark.parametrize("topk", [4, 0])
def test_each_corruption_is_avoided_with_two_servers_and_reported_with_one(sglang: Engine, topk: int) -> None:
    async def both(pool: ServerPool) -> Any:
        result = await answers(pool, requests)
        return result, pool.counts

    async def alone(pool: ServerPool) -> None:
        await answers(pool, requests)

    with Proxy(sglang.url) as proxy:
        for name, (lie, said) in LIES.items():
            if "Top-K" in name and not topk:
                continue
            # The witnesses are the most probable tokens, which have to be sampled sometimes, as of a trained model; and
            # an answer may end before it has anything to shift.
            more: dict[str, Any] = {"topk": topk, "temperature": 0.2}
            requests = [ask([*SHORT, i], 24, routing=ROUTING, stop=(END,), **more) for i in range(12)]
            proxy.lie = generation_lie(lie())
            result, counts = over([proxy.url, sglang.url], both)
            assert all(len(g.token_ids) == 24 or g.token_ids[-1] == END for g in result), name
            assert counts.invalid_responses >= 2, name
            matching = [message for message in counts.messages if re.search(said, message)]
            assert matching and all(proxy.url in message for message in counts.messages), (name, counts.messages)
            proxy.lie = generation_lie(lie())
            message = rf"none of 1 can be used.*{proxy.url}: it violated the contract \d+ times.*({said})"
            with pytest.raises(ServerError, match=message):
                over([proxy.url], alone)


def test_correct_responses_of_a_real_server_satisfy_the_contract_bit_for_bit(sglang: Engine) -> None:
    """The tolerance is for other kernels: here nothing differs at all."""
    worst = 0.0

    async def use(pool: ServerPool) -> tuple[list[Generation], Any]:
        requests = [
            ask(
                range(10 + i, 40),
                150,
                topk=(8, 1)[i % 2],
                temperature=(1.0, 0.6, 0.0)[i % 3],
                # With this many ends one is surely met, and a short limit is reached before.
                stop=(END, *range(100, 120)) if i % 4 == 0 else (END,),
            )
            for i in range(24)
        ]
        return await answers(pool, requests), pool.counts

    result, counts = over([sglang.url], use)
    assert counts.invalid_responses == 0 == counts.retries
    for answer in result:
        assert answer.echo is not None and answer.echo.best_logprobs is not None
        for i, (token, value) in enumerate(zip(answer.token_ids.tolist(), answer.logprobs.tolist(), strict=True)):
            if answer.echo.best_token_ids[i] == token:  # type: ignore[index]
                worst = max(worst, abs(float(answer.echo.best_logprobs[i]) - value))
    assert worst == 0.0
    assert {answer.finish_reason for answer in result} == {"stop", "length"}
