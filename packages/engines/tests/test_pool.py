"""Where requests go, and that each is answered exactly once by the right weights, whatever servers do."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence

import pytest

from fake_servers import CONTRACT, FakeServer
from megatron_dppo_engines.errors import NoUsableServer, ServerError
from megatron_dppo_engines.responses import SamplingParams
from megatron_dppo_engines.server import GenerateRequest, Generation
from megatron_dppo_engines.servers.contract import checked
from megatron_dppo_engines.servers.pool import ServerPool


def request(name: str, tokens: int = 4) -> GenerateRequest:
    return GenerateRequest(request_id=name, token_ids=(7, 8, 9), params=SamplingParams(max_new_tokens=tokens))


def pool_of(
    servers: Sequence[FakeServer],
    *,
    version: int = 3,
    health: float = 0.02,
    most: int = 64,
    first: int = 0,
    patience: float = 2.0,
) -> ServerPool:
    pool = ServerPool(
        servers,  # type: ignore[arg-type]
        checked(CONTRACT),
        max_in_flight=most,
        health_seconds=health,
        unavailable_timeout_seconds=patience,
        first=first,
    )
    for server in servers:
        server.version = version
    pool.use_version(version, [server.url for server in servers])
    return pool


def fakes(count: int, seconds: float = 0.003) -> list[FakeServer]:
    return [FakeServer(f"http://s:{i}", token_seconds=seconds) for i in range(count)]


async def ask(pool: ServerPool, count: int, siblings: int = 1, tokens: int = 4) -> list[Generation]:
    """``count`` requests at once."""
    calls = (pool.generate(request(f"r{i}", tokens), f"p{i // siblings}") for i in range(count))
    return await asyncio.wait_for(asyncio.gather(*calls), 10)


def shares(servers: Sequence[FakeServer]) -> list[int]:
    return [len(server.requests) for server in servers]


def test_requests_go_to_the_least_loaded_server_and_siblings_to_the_same_one() -> None:
    servers = fakes(3)
    asyncio.run(ask(pool_of(servers), 24, siblings=8))
    assert shares(servers) == [8, 8, 8]
    for server in servers:
        assert len({int(r.request_id[1:]) // 8 for r in server.requests}) == 1


def test_the_time_of_each_response_is_counted_by_server(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = fakes(2)
    pool = pool_of(servers)
    # A clock that ticks when it is read, and does not begin at 0.
    ticks = itertools.count(1e6)
    monkeypatch.setattr(ServerPool, "now", lambda self: next(ticks))
    asyncio.run(ask(pool, 24, siblings=8))
    assert {url: (each.responses, each.tokens) for url, each in pool.counts.times.items()} == {
        server.url: (len(server.requests), 4 * len(server.requests)) for server in servers
    }
    reads = next(ticks) - 1e6
    assert all(each.responses <= each.seconds <= each.responses * reads for each in pool.counts.times.values())


def test_siblings_move_to_another_server_when_theirs_is_much_busier() -> None:
    servers = fakes(2)
    asyncio.run(ask(pool_of(servers), 60, siblings=60))
    assert sum(shares(servers)) == 60 and min(shares(servers)) >= 20


def test_pools_of_several_ranks_start_with_different_servers() -> None:
    servers = fakes(3)
    for first in range(3):
        asyncio.run(ask(pool_of(servers, first=first), 1))
    assert shares(servers) == [1, 1, 1] and [s.requests[0].request_id for s in servers] == ["r0"] * 3


def test_no_more_requests_are_in_flight_than_allowed() -> None:
    servers = fakes(1)
    answers = asyncio.run(ask(pool_of(servers, most=5), 17))
    assert servers[0].most == 5 and len(answers) == 17


@pytest.mark.parametrize("way", ["dead", "hung"])
def test_requests_of_a_server_that_dies_or_hangs_are_completed_once_by_the_others(way: str) -> None:
    servers = fakes(3)

    async def run() -> tuple[ServerPool, list[Generation]]:
        pool = pool_of(servers)
        answers = asyncio.create_task(ask(pool, 30, tokens=20))
        await asyncio.sleep(0.02)
        setattr(servers[1], way, True)
        return pool, await answers

    pool, answers = asyncio.run(run())
    assert [len(answer.token_ids) for answer in answers] == [20] * 30
    assert not servers[1].finished
    done = Counter(name.split("~")[0] for server in servers for name in server.finished)
    assert done == Counter(f"r{i}" for i in range(30)), "each exactly once"
    assert pool.counts.evicted_servers == 1 and pool.counts.retries == 10


def test_a_rejected_request_is_the_callers_error_and_evicts_no_server() -> None:
    servers = fakes(2)
    for server in servers:
        server.refuses = {"bad"}

    async def run() -> None:
        pool = pool_of(servers)
        with pytest.raises(ServerError, match="HTTP 400: too long"):
            await pool.generate(request("bad"), "p")
        assert len(await ask(pool, 4)) == 4 and pool.counts.evicted_servers == 0 and pool.counts.retries == 0

    asyncio.run(run())


def test_a_restarted_server_is_used_only_with_the_current_weights() -> None:
    servers = fakes(2)

    async def run() -> None:
        pool = pool_of(servers)
        servers[0].dead = True
        await ask(pool, 4)
        servers[0].dead, servers[0].version = False, -1
        await ask(pool, 8, tokens=20)
        assert not servers[0].requests, "its weights are those that it started with"
        servers[0].version = 3
        await ask(pool, 2, tokens=30)
        await ask(pool, 12)
        assert servers[0].requests
        pool.use_version(4, [servers[1].url])
        servers[1].version, before = 4, len(servers[0].requests)
        await ask(pool, 8, tokens=20)
        assert len(servers[0].requests) == before, "a sync that did not reach it"
        servers[0].version = 4
        await ask(pool, 8, tokens=30)
        assert len(servers[0].requests) == before, "a version of this name that this sync did not give it"

    asyncio.run(run())


def test_a_response_from_other_weights_is_not_used() -> None:
    servers = fakes(2)

    async def run() -> None:
        pool = pool_of(servers)
        servers[0].version = -1
        answers = await ask(pool, 6)
        assert {span.policy_version for a in answers for span in a.versions} == {3}
        assert len(answers) == 6 and pool.counts.evicted_servers == 1 and pool.counts.retries >= 1
        servers[1].version = 2
        with pytest.raises(NoUsableServer, match=r"version 3: http://s:0: .*version -1"):
            await pool.generate(request("x"), "p")

    asyncio.run(run())


def test_a_server_that_reports_one_version_and_samples_with_another_is_an_error() -> None:
    servers = fakes(1)

    async def run() -> None:
        pool = pool_of(servers, patience=0.1)
        servers[0].version, servers[0].reported = 2, 3
        with pytest.raises(ServerError, match="version 2, expected 3"):
            await ask(pool, 1)

    asyncio.run(run())


def test_a_response_may_have_tokens_of_each_version_that_was_current_meanwhile() -> None:
    servers = fakes(1, seconds=0.01)

    async def run() -> None:
        pool = pool_of(servers)
        running = asyncio.create_task(ask(pool, 1, tokens=20))
        await asyncio.sleep(0.05)
        servers[0].version = 5
        pool.use_version(5, [servers[0].url])
        (answer,) = await running
        assert [span.policy_version for span in answer.versions] == [3, 5] and pool.counts.retries == 0

    asyncio.run(run())


def test_without_a_usable_server_the_error_lists_each_server_and_its_problem() -> None:
    servers = fakes(2)
    servers[0].dead = servers[1].dead = True

    async def run() -> None:
        pool = pool_of(servers, patience=0.1)
        with pytest.raises(NoUsableServer, match="http://s:0: Connection refused; http://s:1: Connection"):
            await pool.generate(request("r"), "p")

    asyncio.run(run())


def test_a_request_that_finds_no_usable_server_waits_as_long_as_one_that_failed() -> None:
    """The first request finds out that the servers are gone; the second never reaches one."""
    servers = fakes(2)

    async def run() -> None:
        pool = pool_of(servers, patience=0.1)
        servers[0].dead = servers[1].dead = True
        for name in ("first", "second"):
            with pytest.raises(NoUsableServer, match="none of 2 can"):
                await pool.generate(request(name), "p")

    asyncio.run(run())


def test_a_short_failure_of_the_only_server_is_survived() -> None:
    servers = fakes(1)

    async def run() -> None:
        pool = pool_of(servers)
        servers[0].dead = True
        running = asyncio.create_task(pool.generate(request("r"), "p"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        servers[0].dead = False
        assert len((await running).token_ids) == 4

    asyncio.run(run())


def test_abort_stops_the_named_requests_wherever_they_are() -> None:
    servers = fakes(2, seconds=0.005)

    async def run() -> None:
        pool = pool_of(servers)
        running = asyncio.create_task(ask(pool, 6, tokens=40))
        await asyncio.sleep(0.05)
        await pool.abort(["r1", "r4", "unknown"])
        answers = await running
        assert [a.finish_reason for a in answers] == ["length", "abort", "length", "length", "abort", "length"]
        assert 0 < len(answers[1].token_ids) < 40

    asyncio.run(run())


def test_a_cancelled_caller_leaves_nothing_running() -> None:
    servers = fakes(1, seconds=0.01)

    async def run() -> None:
        pool = pool_of(servers)
        running = asyncio.create_task(pool.generate(request("r", 1000), "p"))
        await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.sleep(0)
        assert servers[0].running == 0 and len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_wrong_use_is_refused() -> None:
    servers = fakes(1)
    pool = ServerPool(servers, checked(CONTRACT), max_in_flight=1, health_seconds=1)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="before the first use_version"):
        asyncio.run(pool.generate(request("r"), "p"))
    with pytest.raises(ValueError, match="'http://other:1'"):
        pool.use_version(1, ["http://other:1"])
    with pytest.raises(ValueError, match="one server"):
        ServerPool([], checked(CONTRACT), max_in_flight=1, health_seconds=1)


def test_an_excluded_server_gets_no_request_also_after_a_sync() -> None:
    servers = fakes(2)
    pool = pool_of(servers)

    async def run() -> None:
        await ask(pool, 8)
        pool.exclude(servers[0].url, "it samples otherwise")
        before = shares(servers)[0]
        await ask(pool, 8)
        for server in servers:
            server.version = 4
        pool.use_version(4, [server.url for server in servers])
        await ask(pool, 8)
        assert before > 0 and shares(servers)[0] == before

    asyncio.run(run())
    assert any("it samples otherwise" in message for message in pool.counts.messages)


def test_the_messages_tell_of_each_server_that_breaks_the_contract_and_of_its_end() -> None:
    """Seven of nine servers sample an id that no vocabulary has: two messages for each, whatever is in flight."""
    servers = fakes(9)
    for server in servers[1:8]:
        server.sample = lambda request, position: 10**6
    pool = pool_of(servers)
    asyncio.run(ask(pool, 90))
    for server in servers:
        prefixes = (f"{server.url}:", f"{server.url} ")
        about = [message for message in pool.counts.messages if message.startswith(prefixes)]
        assert len(about) == 2 * (server in servers[1:8]), about
        assert not about or ("1000000" in about[0] and "not used any more" in about[1])


def test_tokens_have_their_server_and_their_ranks_are_added_up_by_server() -> None:
    servers = fakes(2)
    pool = pool_of(servers)
    generations = asyncio.run(ask(pool, 8))
    urls = {server.url for server in servers}
    assert {span.server for each in generations for span in each.versions} == urls == pool.ranks.keys()
    assert sum(ranks.tokens for ranks in pool.ranks.values()) == sum(each.ranks.tokens for each in generations)
