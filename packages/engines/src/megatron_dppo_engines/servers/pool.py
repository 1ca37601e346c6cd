"""Load balancing, retries and weight versions over several inference servers.

Belongs to one event loop. No method but ``generate``, ``abort`` and ``pause`` waits, so no locks are needed.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from megatron_dppo_engines.errors import ContractViolation, NoUsableServer, ServerError
from megatron_dppo_engines.sampling_sums import RankSums
from megatron_dppo_engines.server import GenerateCall, GenerateRequest, Generation, InferenceServer
from megatron_dppo_engines.servers.pooled_server import Gate, HealthMonitor, PooledServer
from megatron_dppo_engines.servers.response_times import ResponseTimes
from megatron_dppo_engines.sums import add_by_key

_RECHECK_SECONDS = 1.0
"""Seconds between two rounds of checks when no server is usable."""
_PAUSE_SECONDS = 30.0
_ABORT_INTERVAL = 0.2
"""Seconds between two aborts of a request: a server ignores an abort that arrives before it has queued the request."""
MAX_IMBALANCE = 16
"""Extra requests over the least loaded server up to which a sibling still goes to the server of its siblings. Beyond
that a longer queue costs more than a prompt in the prefix cache saves."""


@dataclass
class PoolCounts:
    """Events since the start."""

    retries: int = 0
    """Requests that were sent again in full."""
    evicted_servers: int = 0
    """Times that a server in use became unhealthy."""
    invalid_responses: int = 0
    """Responses that violated the contract."""
    messages: list[str] = field(default_factory=list)
    """Description of each contract violation and each lost server."""
    times: dict[str, ResponseTimes] = field(default_factory=dict)
    """Times of the valid responses, by URL."""


class _RetryElsewhere(Exception):
    """The response is missing or must not be used; the request goes to another server."""


class ServerPool:
    """Dispatch of requests to the least loaded server; requests with one affinity share a server where that is fair.

    Args:
        max_in_flight: Maximum number of requests in flight; further ones wait in order.
        unavailable_timeout_seconds: Time without a success on any server after which a request that fails everywhere
            is given up.
        first: Index of the server that gets the first request (``RequestSpread``).
        max_imbalance: Extra requests over the least loaded server up to which requests of one affinity share a server.
    """

    def __init__(
        self,
        servers: Sequence[InferenceServer],
        ask: GenerateCall,
        *,
        max_in_flight: int,
        health_seconds: float,
        unavailable_timeout_seconds: float = 60.0,
        first: int = 0,
        max_imbalance: int = MAX_IMBALANCE,
    ) -> None:
        if not servers:
            raise ValueError("ServerPool needs at least one server")
        self.counts = PoolCounts()
        self.ranks: dict[str, RankSums] = {}
        """Ranks of the tokens in the distributions that the servers report, by URL."""
        self._generate_on = ask
        self._patience = unavailable_timeout_seconds
        self._max_imbalance = max_imbalance
        self.servers = [PooledServer(server, (i - first) % len(servers)) for i, server in enumerate(servers)]
        self._slots = asyncio.Semaphore(max_in_flight)
        self._monitor = HealthMonitor(self.servers, health_seconds, self._mark_unhealthy, lambda: self.version)
        self.versions: list[int] = []
        self._gate = Gate()
        self._server_by_affinity: dict[str, PooledServer] = {}
        self._in_flight: dict[str, tuple[PooledServer, str]] = {}
        """Server and name on the server of each request that was sent."""
        self._last_success = float("-inf")

    @property
    def version(self) -> int:
        """Version of the current weights; -1 before the first ``use_version``."""
        return self.versions[-1] if self.versions else -1

    def exclude(self, url: str, problem: str) -> None:
        """Send a server no more requests in this run; requests on it go elsewhere."""
        for server in self.servers:
            if server.url == url:
                server.exclusion = problem
                self._mark_unhealthy(server, problem, is_final=True)

    def use_version(self, version: int, urls: Iterable[str]) -> None:
        """Use only the given servers of the pool, which have exactly ``version``, until the next sync.

        Call it after each publish, when the servers generate again.
        """
        servers = {server.url: server for server in self.servers}
        synced = {url.rstrip("/") for url in urls}
        if unknown := sorted(synced - servers.keys()):
            raise ValueError(f"use_version: {unknown[0]!r} is not a server of this pool; it has {sorted(servers)}")
        if version != self.version:
            self.versions.append(version)
        self._server_by_affinity.clear()  # the prefix caches are empty after a sync
        for url, server in servers.items():
            server.mark_synced(None if url in synced else f"the weight sync did not bring it to version {version}")

    async def pause(self) -> None:
        """Abort all requests on the servers and hold them until ``resume``; each returns its tokens so far.

        Servers do not sample across a change of the weights: they would report the experts of the new weights for
        tokens of the old ones. A request that a server does not return within ``_PAUSE_SECONDS`` stays there.
        """
        # Closed first, so that requests that return are not sent again before the update.
        self._gate.hold()
        self._monitor.is_paused = True
        end = self.now() + _PAUSE_SECONDS
        while self._in_flight and self.now() < end:
            await self.abort(list(self._in_flight))
            next_abort = self.now() + _ABORT_INTERVAL
            while self._in_flight and self.now() < next_abort:
                await asyncio.sleep(_ABORT_INTERVAL / 20)

    def resume(self) -> None:
        """Send requests again after ``pause``."""
        self._gate.release()
        self._monitor.is_paused = not self._gate.is_open

    async def generate(self, request: GenerateRequest, affinity: str) -> Generation:
        """Continue a sequence on one of the servers, with retries on the others.

        - A server that does not respond, or responds with weights that were never current since the request was sent,
          is unhealthy until it works with the current weights.
        - An overloaded server backs off.
        - A server that violates the contract twice is out until the next ``use_version``.

        In each case the whole request goes to another server.

        Args:
            request: Its ``request_id`` is unique among all pools over these servers.
            affinity: Equal for requests with a common prefix, such as siblings of one prompt.

        Raises:
            ServerError: A server rejects the request, or no server is usable. The message lists all servers. It is a
                ``NoUsableServer`` unless each server violated the contract too often.
            RuntimeError: Called before the first ``use_version``.
        """
        if not self.versions:
            raise RuntimeError("ServerPool.generate before the first use_version: no server has weights")
        async with self._slots:
            self._monitor.request_started()
            try:
                return await self._dispatch(request, affinity)
            finally:
                self._in_flight.pop(request.request_id, None)
                self._monitor.request_finished()

    def is_sent(self, request_id: str) -> bool:
        """Return True if a server has the request now; False while it waits in the pool, and afterwards."""
        return request_id in self._in_flight

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests that were sent: their ``generate`` returns the tokens so far. Others are left alone.

        A request that the server has not queued yet continues. Call again until all have returned.
        """

        async def abort_one(server: PooledServer, name: str) -> None:
            with contextlib.suppress(ServerError):  # a broken server shows in the request itself
                await server.server.abort(name)

        sent = [self._in_flight[name] for name in request_ids if name in self._in_flight]
        await asyncio.gather(*(abort_one(server, name) for server, name in sent))

    async def _dispatch(self, request: GenerateRequest, affinity: str) -> Generation:
        failed: set[PooledServer] = set()
        first_failure: float | None = None
        attempt = 0
        while True:
            await self._gate.wait_open()
            server = await self._select_server(affinity, failed, first_failure)
            # An earlier attempt may still run on a hanging server, so each attempt has a name.
            sent = replace(request, request_id=f"{request.request_id}~{attempt}") if attempt else request
            self._in_flight[request.request_id] = (server, sent.request_id)
            try:
                return await self._send(server, sent)
            except _RetryElsewhere as error:
                self._in_flight.pop(request.request_id, None)
                self.counts.retries += 1
                problem = str(error)
            attempt += 1
            failed.add(server)
            first_failure = self.now() if first_failure is None else first_failure
            # Servers that recover and fail in turn must not keep a request alive forever.
            if attempt > 2 * len(self.servers) and self.now() >= self._deadline(first_failure):
                states = "; ".join(s.describe() for s in self.servers)
                raise ServerError(
                    "rollout.servers",
                    f"request {request.request_id} failed {attempt} times; the last time: {problem}. Servers: {states}",
                )

    async def _send(self, server: PooledServer, request: GenerateRequest) -> Generation:
        """Send a request to a server and check which weights responded."""
        version_index = len(self.versions) - 1
        evictions = server.evictions
        sent = self.now()
        task = asyncio.ensure_future(self._generate_on(server.server, request))
        server.in_flight.add(task)
        try:
            # ``wait`` and not ``await``: when the server is evicted, its task is cancelled, but not this one.
            await asyncio.wait({task})
        finally:  # also when the caller is cancelled
            server.in_flight.discard(task)
            task.cancel()
        # The server became unhealthy meanwhile: a response that arrives at the last moment is discarded too.
        if task.cancelled() or server.evictions != evictions:
            _ = task.cancelled() or task.exception()  # asyncio complains of an exception that is never read
            raise _RetryElsewhere(server.describe())
        try:
            generation = task.result()
        except ServerError as error:
            self._handle_error(server, error)
            raise _RetryElsewhere(str(error)) from None
        # Every version that was current at some time since the request was sent is valid.
        valid = self.versions[version_index:]
        wrong = sorted({span.policy_version for span in generation.versions} - set(valid))
        if wrong:
            problem = f"it responded with weights of version {wrong[0]}, expected {valid[-1]}"
            self._mark_unhealthy(server, problem)
            raise _RetryElsewhere(server.describe())
        server.failures = 0
        self._last_success = self.now()
        times = ResponseTimes(responses=1.0, tokens=len(generation.token_ids), seconds=self._last_success - sent)
        add_by_key(self.counts.times, {server.url: times})
        add_by_key(self.ranks, {server.url: generation.ranks})
        return replace(generation, versions=tuple(span._replace(server=server.url) for span in generation.versions))

    def _handle_error(self, server: PooledServer, error: ServerError) -> None:
        """Update the state of a server after a failed request; raise the error if the request itself is wrong."""
        if isinstance(error, ContractViolation):
            self.counts.invalid_responses += 1
            if not server.violations:  # the end of the server tells of the later ones
                self.counts.messages.append(str(error))
            server.back_off(self.now(), error.detail)
            server.violations.append(error.detail)
            if server.is_banned:
                count = len(server.violations)
                problem = f"it violated the contract {count} times since the last sync, the last time: {error.detail}"
                self._mark_unhealthy(server, problem, is_final=True)
        elif error.is_transient:
            server.back_off(self.now(), str(error), error.retry_after)
        elif error.status is None:  # no HTTP response at all
            self._mark_unhealthy(server, error.detail)
        else:
            # Any other status says that the request itself is wrong: it would fail on every server.
            raise error

    async def _select_server(
        self, affinity: str, failed: set[PooledServer], first_failure: float | None
    ) -> PooledServer:
        """Return the server for the next attempt, if possible one that the request has not failed on."""
        first_failure = self.now() if first_failure is None else first_failure
        while True:
            now = self.now()
            usable = self._usable()
            if ready := [server for server in usable if server.back_off_until <= now]:
                # A request that failed on all of them is tried once more on any that is ready.
                return self._least_loaded(affinity, [s for s in ready if s not in failed] or ready)
            wait = min((server.back_off_until for server in usable), default=now + _RECHECK_SECONDS) - now
            if not usable:
                await self._monitor.recheck_unhealthy()
                if self._usable():
                    continue
            remaining = self._deadline(first_failure) - self.now()
            if remaining <= 0 or all(server.is_final for server in self.servers):
                raise self._no_usable_server()
            await asyncio.sleep(min(wait, remaining))

    def _least_loaded(self, affinity: str, ready: list[PooledServer]) -> PooledServer:
        """Return the server of the siblings, or the least loaded one if that is much less busy."""
        least = min(ready, key=lambda server: (len(server.in_flight), server.preference))
        server = self._server_by_affinity.get(affinity, least)
        if server not in ready or len(server.in_flight) - len(least.in_flight) > self._max_imbalance:
            server = least
        self._server_by_affinity[affinity] = server
        return server

    def _no_usable_server(self) -> ServerError:
        error_class = ServerError if all(server.is_banned for server in self.servers) else NoUsableServer
        return error_class(
            "rollout.servers",
            f"none of {len(self.servers)} can be used at policy version {self.version}: "
            f"{'; '.join(server.describe() for server in self.servers)}. Restart the "
            "servers, and the run: it continues from its last checkpoint",
        )

    def _deadline(self, first_failure: float) -> float:
        """Return the time at which a request that has failed since ``first_failure`` is given up."""
        # A success on any server shows that waiting helps, so the time begins anew.
        return max(first_failure, self._last_success) + self._patience

    def now(self) -> float:
        """Return the time of the event loop, in seconds."""
        return asyncio.get_running_loop().time()

    def _usable(self) -> list[PooledServer]:
        return [server for server in self.servers if server.problem is None]

    def _mark_unhealthy(self, server: PooledServer, problem: str, *, is_final: bool = False) -> None:
        server.back_off(self.now(), problem)
        if server.mark_unhealthy(problem, is_final=is_final):
            self.counts.evicted_servers += 1
            self.counts.messages.append(f"{server.url} is not used any more: {problem}")
