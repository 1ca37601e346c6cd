"""The state of one server of a pool, its health checks, and the gate that holds requests back during an update."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_dppo.errors import ServerError
from megatron_dppo.rollout.server import Generation, InferenceServer

_FIRST_REST = 0.5


_LONGEST_REST = 10.0


_LONGEST_WISH = 30.0
"""Seconds of a Retry-After that are granted."""


BREACHES = 2
"""Broken contracts after which a server is out until the next sync. The first may be an accident on the way."""


@dataclass(eq=False)
class PooledServer:
    """A server and what is known of it. Times are those of the event loop."""

    server: InferenceServer
    place: int
    """in the order of preference among equally loaded ones"""
    problem: str | None = "no weights were published to it yet"
    """why it is not used; None = it is"""
    synced: bool = False
    """whether the last sync brought it to the current version"""
    final: bool = False
    """whether only the next sync can change that"""
    trouble: str = ""
    """the last failure of a request"""
    failures: int = 0
    """failed bursts of requests since the last good answer"""
    rest_until: float = 0.0
    """it gets no work before, unless there is nobody else"""
    breaches: list[str] = field(default_factory=list)
    """broken contracts since the last sync"""
    failed_checks: int = 0
    losses: int = 0
    """times that it was given up: an answer to a request from before such a time is not used"""
    running: set[asyncio.Task[Generation]] = field(default_factory=set)

    @property
    def url(self) -> str:
        """Its name."""
        return self.server.url

    def welcome(self, problem: str | None) -> None:
        """Begin anew after a sync; ``problem`` as the field."""
        self.problem, self.final, self.synced = problem, problem is not None, problem is None
        self.trouble, self.failures, self.rest_until, self.failed_checks = "", 0, 0.0, 0
        self.breaches.clear()

    def rest(self, now: float, trouble: str, wish: float | None = None) -> None:
        """Give it no work for a while, longer each time it fails again.

        Args:
            now: the time.
            trouble: why.
            wish: seconds that the server itself asked for.
        """
        self.trouble = trouble
        if now < self.rest_until:  # one burst of requests fails as one
            return
        seconds = min(_FIRST_REST * 2.0**self.failures, _LONGEST_REST)
        self.failures = min(self.failures + 1, 32)
        self.rest_until = now + (seconds if wish is None else max(seconds, min(wish, _LONGEST_WISH)))

    def lose(self, problem: str, *, final: bool = False) -> bool:
        """Give it up, with all that it works on; whether it was in use until now."""
        self.final = self.final or final
        if self.problem is not None:
            return False
        self.problem = problem
        self.losses += 1
        for task in self.running:
            task.cancel()
        return True

    @property
    def banned(self) -> bool:
        """Whether it broke the contract too often to be used before the next sync."""
        return len(self.breaches) >= BREACHES

    def state(self) -> str:
        """Why it is not used now, for a message."""
        return f"{self.url}: {self.problem or self.trouble or 'it works'}"


class Gate:
    """Open as long as nobody holds it. Belongs to one event loop."""

    def __init__(self) -> None:
        self._holds, self._open = 0, asyncio.Event()
        self._open.set()

    async def passed(self) -> None:
        """Wait until it is open."""
        await self._open.wait()

    def hold(self) -> None:
        """Shut it, until as many calls of ``release``."""
        self._holds += 1
        self._open.clear()

    def release(self) -> None:
        """Take one ``hold`` back."""
        self._holds -= 1
        if not self._holds:
            self._open.set()

    @property
    def is_open(self) -> bool:
        """Whether nobody holds it."""
        return not self._holds


_FAILED_CHECKS = 3
"""Health checks in a row that a server may fail: one that is only busy answers late, but not three times."""


class Watch:
    """Two checks of each server. ``alive`` is cheap, and a server that only works hard passes it: one failure counts.
    ``health`` goes through the whole engine and may take long.

    Args:
        members: whom.
        seconds: between two checks.
        lose: gives a server up, with the reason.
        version: the weights that a server must have to be used again.
    """

    def __init__(
        self,
        members: Sequence[PooledServer],
        seconds: float,
        lose: Callable[[PooledServer, str], None],
        version: Callable[[], int],
    ) -> None:
        self._members, self._seconds, self._lose, self._version = members, seconds, lose, version
        self.resting = False
        """servers are being given new weights: a paused one is not sick, and none is taken back"""
        self._under_way = 0
        self._checks: list[asyncio.Task[None]] = []
        self._rescue: asyncio.Task[None] | None = None

    def enter(self) -> None:
        """A request begins; checks run from the first one on."""
        self._under_way += 1
        if not self._checks:
            loops = (self._watch_answers, self._watch_health)
            self._checks = [asyncio.create_task(loop(member)) for member in self._members for loop in loops]

    def leave(self) -> None:
        """A request ended; the last one ends the checks."""
        self._under_way -= 1
        if not self._under_way:
            for check in self._checks:
                check.cancel()
            self._checks = []

    async def ask_again(self) -> None:
        """Ask every server at once whether it can be used again; callers at the same time share one round."""
        if self._rescue is None or self._rescue.done():
            self._rescue = asyncio.create_task(self._ask_all())
        await asyncio.shield(self._rescue)

    async def _ask_all(self) -> None:
        await asyncio.gather(*(self._take_back(member) for member in self._members if member.problem is not None))

    async def _take_back(self, member: PooledServer) -> None:
        """Use a server again, if it works and has the current weights.

        Those of one that the last sync left out are never current, whatever it calls them: a run that was killed may
        have given it a version of this number, which had other weights.
        """
        if member.banned or not member.synced:
            return
        try:
            version = (await member.server.info()).policy_version
        except ServerError:
            return
        if member.banned or member.problem is None:
            return
        if version != self._version():
            member.problem = f"it answers, but its weights are version {version}, expected {self._version()}"
            member.final = True
        # New weights may come while health is asked: then the version that was read says nothing any more.
        elif await member.server.health() and version == self._version() and not member.banned:
            member.problem, member.final, member.failed_checks = None, False, 0

    async def _watch_answers(self, member: PooledServer) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            if not await member.server.alive():
                self._lose(member, "it does not answer")
            elif member.problem is not None and not self.resting:
                await self._take_back(member)
                if member.problem is None:
                    member.rest_until = 0.0

    async def _watch_health(self, member: PooledServer) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            if self.resting or member.problem is not None or await member.server.health() or self.resting:
                member.failed_checks = 0
                continue
            member.failed_checks += 1
            if member.failed_checks >= _FAILED_CHECKS:
                self._lose(member, f"it failed {member.failed_checks} health checks in a row")
