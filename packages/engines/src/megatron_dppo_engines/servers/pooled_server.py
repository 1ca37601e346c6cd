"""State of one server of a pool, its health checks, and the gate that holds requests during a weight update."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_dppo_engines.errors import ServerError
from megatron_dppo_engines.server import Generation, InferenceServer

_FIRST_BACK_OFF = 0.5
"""Seconds of the first back-off; each further failure doubles them."""
_LONGEST_BACK_OFF = 10.0
"""Longest back-off in seconds that the pool chooses itself."""
_LONGEST_RETRY_AFTER = 30.0
"""Longest ``Retry-After`` in seconds that is respected."""
MAX_VIOLATIONS = 2
"""Contract violations after which a server is out until the next sync. A single one may be a network accident."""


@dataclass(eq=False)
class PooledServer:
    """A server and its state in the pool. Times are those of the event loop."""

    server: InferenceServer
    preference: int
    """Rank among equally loaded servers; the lowest is chosen first."""
    problem: str | None = "no weights were published to it yet"
    """Reason why the server is unhealthy. None if it is in use."""
    is_synced: bool = False
    """True if the last sync brought the server to the current version."""
    is_final: bool = False
    """True if only the next sync can make the server healthy again."""
    last_failure: str = ""
    """Last failure of a request."""
    failures: int = 0
    """Bursts of failed requests since the last success."""
    back_off_until: float = 0.0
    """Time before which the server gets no request, unless no other server is usable."""
    violations: list[str] = field(default_factory=list)
    """Contract violations since the last sync."""
    failed_checks: int = 0
    """Failed health checks in a row."""
    evictions: int = 0
    """Number of times the server became unhealthy. A response to a request from before the last one is discarded."""
    in_flight: set[asyncio.Task[Generation]] = field(default_factory=set)
    exclusion: str | None = None
    """Reason why the run does not use the server any more, whatever a sync does. None: it is not excluded."""

    @property
    def url(self) -> str:
        """URL of the server, which is also its name."""
        return self.server.url

    @property
    def is_banned(self) -> bool:
        """True if the server violated the contract too often to be used before the next sync."""
        return len(self.violations) >= MAX_VIOLATIONS

    def mark_synced(self, problem: str | None = None) -> None:
        """Reset the state after a weight sync, which left the server out if there is a problem."""
        problem = self.exclusion or problem
        self.problem = problem
        self.is_final = problem is not None
        self.is_synced = problem is None
        self.last_failure = ""
        self.failures = 0
        self.back_off_until = 0.0
        self.failed_checks = 0
        self.violations.clear()

    def back_off(self, now: float, reason: str, retry_after: float | None = None) -> None:
        """Send the server no requests for a while, longer after each further failure."""
        self.last_failure = reason
        if now < self.back_off_until:  # a burst of requests that fail together counts once
            return
        seconds = min(_FIRST_BACK_OFF * 2.0**self.failures, _LONGEST_BACK_OFF)
        # Limited, because ``2.0**failures`` overflows at 1024.
        self.failures = min(self.failures + 1, 32)
        if retry_after is not None:
            seconds = max(seconds, min(retry_after, _LONGEST_RETRY_AFTER))
        self.back_off_until = now + seconds

    def mark_unhealthy(self, problem: str, *, is_final: bool = False) -> bool:
        """Stop using the server and cancel its requests; return True if it was in use until now."""
        self.is_final = self.is_final or is_final
        if self.problem is not None:
            return False
        self.problem = problem
        self.evictions += 1
        for task in self.in_flight:
            task.cancel()
        return True

    def describe(self) -> str:
        """Return the URL and the reason why the server is not used now, for an error message."""
        return f"{self.url}: {self.problem or self.last_failure or 'it works'}"


class Gate:
    """A barrier that is open while it has no holds. Belongs to one event loop."""

    def __init__(self) -> None:
        self._holds = 0
        self._open = asyncio.Event()
        self._open.set()

    @property
    def is_open(self) -> bool:
        """True if there is no hold."""
        return not self._holds

    async def wait_open(self) -> None:
        """Wait until the gate is open."""
        await self._open.wait()

    def hold(self) -> None:
        """Close the gate until ``release`` was called as often."""
        self._holds += 1
        self._open.clear()

    def release(self) -> None:
        """Undo one ``hold``."""
        self._holds -= 1
        if not self._holds:
            self._open.set()


_MAX_FAILED_CHECKS = 3
"""Failed health checks in a row that make a server unhealthy: a busy server may be late once, but not three times."""


class HealthMonitor:
    """Periodic checks of each server while requests are in flight.

    There are two checks. ``alive`` is cheap and a busy server passes it, so one failure counts. ``health`` goes through
    the whole engine and may take long.
    """

    def __init__(
        self,
        servers: Sequence[PooledServer],
        seconds: float,
        mark_unhealthy: Callable[[PooledServer, str], None],
        current_version: Callable[[], int],
    ) -> None:
        self._servers = servers
        self._seconds = seconds
        self._mark_unhealthy = mark_unhealthy
        self._current_version = current_version
        self.is_paused = False
        """True during a weight update: a paused server is not unhealthy, and no server is readmitted."""
        self._in_flight = 0
        self._checks: list[asyncio.Task[None]] = []
        self._recheck: asyncio.Task[None] | None = None

    def request_started(self) -> None:
        """Count a request; the first one starts the checks."""
        self._in_flight += 1
        if not self._checks:
            loops = (self._check_liveness, self._check_health)
            self._checks = [asyncio.create_task(loop(server)) for server in self._servers for loop in loops]

    def request_finished(self) -> None:
        """Discount a request; the last one stops the checks."""
        self._in_flight -= 1
        if not self._in_flight:
            for check in self._checks:
                check.cancel()
            self._checks = []

    async def recheck_unhealthy(self) -> None:
        """Check at once if unhealthy servers can be used again; concurrent callers share one round."""
        if self._recheck is None or self._recheck.done():
            self._recheck = asyncio.create_task(self._recheck_all())
        # A caller that is cancelled must not cancel the round of the others.
        await asyncio.shield(self._recheck)

    async def _recheck_all(self) -> None:
        await asyncio.gather(*(self._readmit(server) for server in self._servers if server.problem is not None))

    async def _readmit(self, server: PooledServer) -> None:
        """Use a server again if it works and has the current weights.

        A server that the last sync left out never counts as current, whatever version it reports. A run that was
        killed may have given it a version of the same number with other weights.
        """
        if server.is_banned or not server.is_synced:
            return
        try:
            version = (await server.server.info()).policy_version
        except ServerError:
            return
        # The state may have changed during the request.
        if server.is_banned or server.problem is None:
            return
        if version != self._current_version():
            server.problem = f"it responds, but its weights are version {version}, expected {self._current_version()}"
            server.is_final = True
        # New weights may arrive during the health check; then the version that was read is outdated.
        elif await server.server.health() and version == self._current_version() and not server.is_banned:
            server.problem = None
            server.is_final = False
            server.failed_checks = 0

    async def _check_liveness(self, server: PooledServer) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            if not await server.server.alive():
                self._mark_unhealthy(server, "it does not respond")
            elif server.problem is not None and not self.is_paused:
                await self._readmit(server)
                if server.problem is None:
                    # It has just passed its checks and need not wait for the end of its back-off.
                    server.back_off_until = 0.0

    async def _check_health(self, server: PooledServer) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            # An update may begin during the check: its result says nothing then.
            if self.is_paused or server.problem is not None or await server.server.health() or self.is_paused:
                server.failed_checks = 0
                continue
            server.failed_checks += 1
            if server.failed_checks >= _MAX_FAILED_CHECKS:
                self._mark_unhealthy(server, f"it failed {server.failed_checks} health checks in a row")
