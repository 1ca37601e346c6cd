"""Servers of a pool that lie, are overloaded, freeze or fall ill: what they cost; nothing of theirs is used."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from columns import ids, logs
from fake_servers import FakeServer
from megatron_dppo.errors import ContractViolation, ServerError
from megatron_dppo_engines.server import GenerateRequest, Generation
from megatron_dppo_engines.servers.pool import ServerPool
from test_pool import ask, pool_of, request, shares


class Faulty(FakeServer):
    """``fault`` is asked before each answer: it raises, or changes the answer."""

    fault: Callable[[GenerateRequest, Generation], Generation] | None = None
    alive_calls = info_calls = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        answer = await super().generate(request)
        return answer if self.fault is None else self.fault(request, answer)

    async def alive(self) -> bool:
        self.alive_calls += 1
        return await super().alive()


def faulty(count: int, seconds: float = 0.003) -> list[Faulty]:
    return [Faulty(f"http://s:{i}", token_seconds=seconds) for i in range(count)]


def lie(request: GenerateRequest, answer: Generation) -> Generation:
    """A token that does not exist."""
    return replace(answer, token_ids=torch.cat([ids([10**6]), answer.token_ids[1:]]))


def status(code: int, wait: float | None = None, times: int = 10**6) -> Any:
    """So many answers with a status, then good ones."""
    left = times

    def fail(request: GenerateRequest, answer: Generation) -> Generation:
        nonlocal left
        left -= 1
        if left >= 0:
            raise ServerError("http://s/generate", "not now", code, retry_after=wait)
        return answer

    return fail


async def later(pool: ServerPool, count: int) -> list[Generation]:
    """Requests of other prompts: none has a server that it goes to by habit."""
    calls = (pool.generate(request(f"later{i}"), f"later{i}") for i in range(count))
    return await asyncio.gather(*calls)


def check(answers: Sequence[Generation], tokens: int = 4) -> None:
    assert [len(answer.token_ids) for answer in answers] == [tokens] * len(answers)
    assert all(int(answer.token_ids.max()) < 200 for answer in answers)


def test_a_server_that_violates_the_contract_twice_is_evicted_until_the_next_sync() -> None:
    servers = faulty(2)
    servers[0].fault = lie

    async def run() -> None:
        pool = pool_of(servers)
        check(await ask(pool, 12))
        assert pool.counts.invalid_responses >= 2 and pool.counts.evicted_servers == 1
        told = [message for message in pool.counts.messages if "token 0 is 1000000" in message]
        assert told and all("http://s:0" in message for message in told)
        servers[0].fault, before = None, len(servers[0].requests)
        check(await ask(pool, 6, tokens=30), 30)  # many health checks long
        assert len(servers[0].requests) == before, "it would be believed again"
        pool.use_version(3, [server.url for server in servers])
        check(await later(pool, 6))
        assert len(servers[0].requests) > before

    asyncio.run(run())


def test_one_contract_violation_does_not_evict_a_server() -> None:
    servers = faulty(2)

    def once(request: GenerateRequest, answer: Generation) -> Generation:
        servers[0].fault = None
        return lie(request, answer)

    servers[0].fault = once

    async def run() -> None:
        pool = pool_of(servers)
        check(await ask(pool, 2))
        assert pool.counts.invalid_responses == 1 == pool.counts.retries and pool.counts.evicted_servers == 0
        await asyncio.sleep(0.6)
        before = len(servers[0].requests)
        check(await later(pool, 8))
        assert len(servers[0].requests) > before

    asyncio.run(run())


def test_the_error_lists_the_violation_of_each_server() -> None:
    servers = faulty(2)
    servers[0].fault = lie
    servers[1].fault = lambda request, answer: replace(
        answer, logprobs=torch.cat([logs([float("nan")]), answer.logprobs[1:]])
    )

    async def run() -> None:
        pool = pool_of(servers)
        first = r"http://s:0: it violated the contract 2 times since the last sync.*token 0 is 1000000"
        second = r"http://s:1: it violated the contract 2 times since the last sync.*log-probability 0 is nan"
        with pytest.raises(ServerError, match=rf"none of 2 .*{first}.*{second}") as caught:
            await pool.generate(request("r"), "p")
        assert caught.value.exit_code == 2, "to be mended, not to be tried again"

    asyncio.run(run())


@pytest.mark.parametrize("code", [200, 408, 425, 429, 500, 502, 503, 504])
def test_an_overloaded_or_failing_server_backs_off_while_others_work(code: int) -> None:
    servers = faulty(2)
    servers[0].fault = status(code, times=4)

    async def run() -> None:
        pool = pool_of(servers)
        check(await ask(pool, 12))
        assert pool.counts.evicted_servers == 0 == pool.counts.invalid_responses and pool.counts.retries == 4
        await asyncio.sleep(0.6)
        before = len(servers[0].requests)
        check(await later(pool, 6))
        assert len(servers[0].requests) > before, "it works again"

    asyncio.run(run())


def test_the_only_server_is_waited_for_as_long_as_the_patience_lasts() -> None:
    servers = faulty(1)

    async def run() -> None:
        servers[0].fault = status(429, times=2)
        pool, loop = pool_of(servers), asyncio.get_running_loop()
        check(await ask(pool, 1))
        assert pool.counts.retries == 2
        servers[0].fault, start = status(503), loop.time()
        with pytest.raises(ServerError, match=r"http://s:0: .*HTTP 503: not now"):
            await pool.generate(request("r"), "p")
        assert 2.0 <= loop.time() - start < 8.0

    asyncio.run(run())


def test_retry_after_is_respected_up_to_a_limit() -> None:
    servers = faulty(1)

    async def run() -> None:
        pool, loop = pool_of(servers, patience=30.0), asyncio.get_running_loop()
        servers[0].fault, start = status(429, wait=1.2, times=1), loop.time()
        check(await ask(pool, 1))
        assert loop.time() - start >= 1.2
        servers[0].fault = status(429, wait=1e9, times=1)
        impatient = pool_of(servers, patience=0.2)
        with pytest.raises(ServerError, match="HTTP 429"):
            await impatient.generate(request("r"), "p")
        (server,) = impatient.servers
        assert server.back_off_until - loop.time() <= 30.0

    asyncio.run(run())


def test_requests_on_a_frozen_server_move_after_one_failed_check_and_it_recovers() -> None:
    servers = faulty(2)

    async def run() -> None:
        pool = pool_of(servers)
        running = asyncio.create_task(ask(pool, 8, tokens=20))
        await asyncio.sleep(0.02)
        servers[0].hung = True
        check(await running, 20)
        assert pool.counts.evicted_servers == 1 and pool.counts.retries == 4
        assert "http://s:0 is not used any more: it does not respond" in pool.counts.messages
        running = asyncio.create_task(ask(pool, 8, tokens=100))
        await asyncio.sleep(0.05)
        servers[0].hung, before = False, len(servers[0].requests)
        for i in range(40):
            await asyncio.sleep(0.01)
            check([await pool.generate(request(f"new{i}"), f"new{i}")])
        assert len(servers[0].requests) > before, "within the rollout"
        check(await running, 100)

    asyncio.run(run())


def test_a_server_whose_engine_hangs_is_evicted_after_three_health_checks() -> None:
    servers = faulty(2)

    async def sick() -> bool:
        nonlocal checks
        checks += 1
        return False

    async def never(request: GenerateRequest) -> Generation:
        await asyncio.sleep(1000)
        raise AssertionError

    checks = 0
    servers[0].health, servers[0].generate = sick, never  # type: ignore[method-assign]

    async def run() -> None:
        pool = pool_of(servers)
        check(await ask(pool, 8))
        assert pool.counts.evicted_servers == 1 and pool.counts.retries == 4 and checks >= 3
        assert "http://s:0 is not used any more: it failed 3 health checks in a row" in pool.counts.messages

    asyncio.run(run())


def test_a_response_of_an_evicted_server_is_not_used() -> None:
    """Also one that arrives in the very moment, when cancelling the call has no effect any more."""
    servers = faulty(2)
    slow = asyncio.Event()

    async def stubborn(asked: GenerateRequest) -> Generation:
        with contextlib.suppress(asyncio.CancelledError):  # the answer is already there
            await slow.wait()
        return replace(await FakeServer("x").generate(asked), finish_reason="abort")

    async def run() -> None:
        servers[0].generate = stubborn  # type: ignore[method-assign]
        pool = pool_of(servers)
        running = asyncio.create_task(pool.generate(request("r"), "p"))
        await asyncio.sleep(0.01)
        pool._mark_unhealthy(pool.servers[0], "given up")
        answer = await running
        assert answer.finish_reason == "length" and pool.counts.retries == 1
        assert [r.request_id for r in servers[1].requests] == ["r~1"]

    asyncio.run(run())


def test_a_refused_request_raises_the_callers_error_after_earlier_failures() -> None:
    servers = faulty(1)
    calls = iter([status(503, times=1), status(400)])

    def both(request: GenerateRequest, answer: Generation) -> Generation:
        return next(calls)(request, answer)  # type: ignore[no-any-return]

    servers[0].fault = both

    async def run() -> None:
        pool: ServerPool = pool_of(servers)
        with pytest.raises(ServerError, match="HTTP 400") as caught:
            await pool.generate(request("r"), "p")
        assert not isinstance(caught.value, ContractViolation)

    asyncio.run(run())


def test_requests_go_to_other_servers_while_one_backs_off() -> None:
    servers = faulty(3)
    servers[1].fault = status(429, wait=5.0)

    async def run() -> None:
        pool = pool_of(servers)
        check(await ask(pool, 30))
        asked = shares(servers)[1]
        check(await later(pool, 30))
        assert shares(servers)[1] == asked

    asyncio.run(run())
