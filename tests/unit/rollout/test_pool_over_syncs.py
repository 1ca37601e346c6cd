"""Changes between two moments of a server pool: weights, versions, failures. No test depends on real seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from fake_servers import SHAPE, FakeServer
from megatron_dppo.errors import NoUsableServer, ServerError
from megatron_dppo_engines.servers.pooled_server import MAX_VIOLATIONS, HealthMonitor, PooledServer
from test_pool import ask, fakes, pool_of, request


class CheckedServer(FakeServer):
    """A server during whose health check something happens."""

    def __init__(self, during_check: Callable[[], None]) -> None:
        super().__init__("http://s:0")
        self.version = 3
        self.during_check = during_check

    async def health(self) -> bool:
        self.during_check()
        return True


def readmitted(
    during_check: Callable[[PooledServer, list[int]], None], *, synced: bool = True, reports: int = 3
) -> bool:
    """Return True if an unhealthy server is used again after a check at version 3 of the weights."""
    version = [3]
    fake = CheckedServer(lambda: during_check(pooled, version))
    pooled = PooledServer(fake, 0)  # type: ignore[arg-type]
    pooled.mark_synced(None if synced else "the weight sync did not bring it to version 3")
    pooled.problem = "it did not respond"
    fake.reported = reports
    monitor = HealthMonitor([pooled], 9.0, lambda *_: None, lambda: version[0])
    asyncio.run(monitor.recheck_unhealthy())
    return pooled.problem is None


def test_a_server_is_used_again_only_with_the_weights_that_the_last_sync_gave_it() -> None:
    def nothing(server: PooledServer, version: list[int]) -> None:
        """Let the check pass."""

    assert readmitted(nothing)
    assert not readmitted(nothing, reports=2) and not readmitted(nothing, reports=4)
    # A run that was killed may have given it other weights under the same number.
    assert not readmitted(nothing, synced=False)


def test_what_happens_during_the_check_counts() -> None:
    def sync(server: PooledServer, version: list[int]) -> None:
        version[0] = 4

    def violate(server: PooledServer, version: list[int]) -> None:
        server.violations += ["a", "b", "c"][:MAX_VIOLATIONS]

    assert not readmitted(sync), "the version that was read is outdated"
    assert not readmitted(violate)


@pytest.mark.parametrize("serves", [3, 4])
def test_a_request_that_waits_over_a_sync_takes_the_new_weights_alone(serves: int) -> None:
    """It was made at version 3 and sent at 4: a response with the old weights was never right."""
    servers = fakes(1, seconds=0.0)

    async def run() -> None:
        pool = pool_of(servers, patience=0.05)
        await pool.pause()
        waiting = asyncio.create_task(pool.generate(request("r"), "p"))
        while not pool._monitor._in_flight:
            await asyncio.sleep(0)
        assert not servers[0].requests, "it waits for the weights"
        servers[0].version = serves
        pool.use_version(4, [servers[0].url])
        pool.resume()
        if serves == 4:
            assert {span.policy_version for span in (await waiting).versions} == {4}
        else:
            with pytest.raises(NoUsableServer, match="version 3, expected 4"):
                await waiting

    asyncio.run(run())


def test_the_routes_of_a_request_that_waits_over_a_sync_are_those_of_the_new_weights() -> None:
    servers = fakes(1, seconds=0.0)

    async def run() -> None:
        pool = pool_of(servers)
        await pool.pause()
        routed = replace(request("r"), routing=SHAPE)
        waiting = asyncio.create_task(pool.generate(routed, "p"))
        while not pool._monitor._in_flight:
            await asyncio.sleep(0)
        servers[0].version = 5
        pool.use_version(5, [servers[0].url])
        pool.resume()
        result = await waiting
        assert result.routed_experts is not None
        # The fake server writes 4 + version % 4 into each row.
        assert set(result.routed_experts[..., 1].flatten().tolist()) == {4 + 5 % 4}

    asyncio.run(run())


def test_failures_lengthen_the_back_off_until_a_success_and_then_anew() -> None:
    servers = fakes(1, seconds=0.0)
    overloaded = ServerError(servers[0].url, "not now", 503)

    async def run() -> None:
        pool = pool_of(servers)
        (server,) = pool.servers

        def fail() -> float:
            server.back_off_until = 0.0  # the earlier back-off is over
            before = pool.now()
            pool._handle_error(server, overloaded)
            return round(server.back_off_until - before, 1)

        assert [fail() for _ in range(7)] == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
        for _ in range(2):
            server.back_off_until = 0.0
            await ask(pool, 1)
            assert [fail() for _ in range(3)] == [0.5, 1.0, 2.0]
        # Requests that fail together count once, and a sync forgets all failures.
        until = server.back_off_until
        pool._handle_error(server, overloaded)
        assert server.back_off_until == until and server.failures == 3
        server.mark_synced()
        assert fail() == 0.5

    asyncio.run(run())
