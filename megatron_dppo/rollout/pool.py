"""Requests over several servers: to whom each goes, what becomes of it when a server dies, and which weights count.

Belongs to one event loop, and no method but ``generate`` and ``abort`` waits for anything, so that no locks are needed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from megatron_dppo.errors import ServerError
from megatron_dppo.rollout.server import GenerateRequest, Generation, InferenceServer

_FAILED_CHECKS = 3
"""Health checks in a row that a server may fail: one that is only busy answers late, but not three times."""
_SLACK = 16
"""Requests that a server may have more than the least loaded one and still get a sibling of what it has: a prompt in
the prefix cache saves less than a long queue costs."""


@dataclass
class PoolCounts:
    """What happened since the start."""

    retries: int = 0
    """requests that were sent again, whole"""
    servers_lost: int = 0
    """times that a server became unusable while it was used"""


@dataclass(eq=False)
class _Member:
    """A server and what is known of it."""

    server: InferenceServer
    place: int
    """in the order of preference among equally loaded ones"""
    problem: str | None = "no weights were published to it yet"
    """why it is not used; None = it is"""
    failed_checks: int = 0
    running: set[asyncio.Task[Generation]] = field(default_factory=set)


class _Unusable(Exception):
    """The answer of a server is not to be had, or not to be used."""


class ServerPool:
    """Dispatches requests to the least loaded server; those with one affinity go to one server where that is fair.

    Args:
        servers: at least one; they are closed by the caller.
        max_in_flight: requests that are under way at a time; more wait their turn, in order.
        health_seconds: between two checks of each server while requests are under way.
        first: which server gets the first request. Each trainer rank has a pool of its own over the same servers, and
            sees only its own load: with different numbers they do not all begin with server 0.
    """

    def __init__(
        self, servers: Sequence[InferenceServer], *, max_in_flight: int, health_seconds: float, first: int = 0
    ) -> None:
        if not servers:
            raise ValueError("ServerPool needs at least one server")
        self.counts = PoolCounts()
        self._members = [_Member(server, (i - first) % len(servers)) for i, server in enumerate(servers)]
        self._slots = asyncio.Semaphore(max_in_flight)
        self._health_seconds = health_seconds
        self._versions: list[int] = []
        self._home: dict[str, _Member] = {}
        self._sent: dict[str, tuple[_Member, str]] = {}
        self._under_way = 0
        self._checks: list[asyncio.Task[None]] = []
        self._rescue: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        """Of the weights that requests are answered with; -1 before the first ``use_version``."""
        return self._versions[-1] if self._versions else -1

    def use_version(self, version: int, urls: Iterable[str]) -> None:
        """From now on these servers, which have exactly ``version``, are used; the others not before they have it too.

        Call it after each publish, when the servers work again.

        Raises:
            ValueError: a URL that is none of the servers'.
        """
        members = {member.server.url: member for member in self._members}
        good = {url.rstrip("/") for url in urls}
        if unknown := sorted(good - members.keys()):
            raise ValueError(f"use_version: {unknown[0]!r} is not a server of this pool; it has {sorted(members)}")
        if version != self.version:
            self._versions.append(version)
        self._home.clear()  # new weights leave no prefix cache
        for url, member in members.items():
            member.failed_checks = 0
            member.problem = None if url in good else f"the weight sync did not bring it to version {version}"

    async def generate(self, request: GenerateRequest, affinity: str) -> Generation:
        """Continue a sequence on some server.

        A server that gives no answer, or one from weights that were not current at any time since the request was
        sent, is not used any more, and the request goes as a whole to another one.

        Args:
            request: ``request_id`` is unique among those of all pools over these servers.
            affinity: the same for requests with a common prefix, as siblings of one prompt have.

        Raises:
            ServerError: a server refuses the request, or no server is usable; then it lists them all.
            RuntimeError: before the first ``use_version``.
        """
        if not self._versions:
            raise RuntimeError("ServerPool.generate before the first use_version: no server has weights")
        async with self._slots:
            self._enter()
            try:
                return await self._dispatch(request, affinity)
            finally:
                self._sent.pop(request.request_id, None)
                self._leave()

    def was_sent(self, request_id: str) -> bool:
        """Whether a server has the request now; False while it waits its turn, and afterwards."""
        return request_id in self._sent

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Stop some requests that were sent: their ``generate`` returns what they have. Others are left alone.

        A request that a server has not queued yet when this arrives goes on; call again until all have returned.
        """

        async def stop(member: _Member, name: str) -> None:
            with contextlib.suppress(ServerError):  # what is wrong with the server shows in the request itself
                await member.server.abort(name)

        await asyncio.gather(*(stop(*self._sent[name]) for name in request_ids if name in self._sent))

    async def _dispatch(self, request: GenerateRequest, affinity: str) -> Generation:
        # Each failure makes a server unusable; one that always comes back and fails again must end, too.
        problem = ""
        for attempt in range(2 * len(self._members) + 1):
            member = await self._choose(affinity)
            # The first try may still run on a server that hangs: a name of its own for each.
            sent = replace(request, request_id=f"{request.request_id}~{attempt}") if attempt else request
            self._sent[request.request_id] = (member, sent.request_id)
            try:
                return await self._ask(member, sent)
            except _Unusable as error:
                self.counts.retries += 1
                problem = str(error)
        raise ServerError(
            "rollout.servers", f"request {request.request_id} failed {attempt + 1} times; the last time: {problem}"
        )

    async def _ask(self, member: _Member, request: GenerateRequest) -> Generation:
        known = len(self._versions) - 1
        task = asyncio.create_task(member.server.generate(request))
        member.running.add(task)
        try:
            await asyncio.wait({task})
        finally:  # also when the caller is cancelled
            member.running.discard(task)
            task.cancel()
        if task.cancelled():
            raise _Unusable(f"{member.server.url}: {member.problem}")
        error = task.exception()
        if isinstance(error, ServerError) and error.unanswered:
            self._lose(member, error.detail if error.status is None else f"HTTP {error.status}: {error.detail}")
            raise _Unusable(str(error))
        generation = task.result()
        current = self._versions[known:]
        wrong = sorted({span.policy_version for span in generation.versions} - set(current))
        if wrong:
            self._lose(member, f"it answered with weights of version {wrong[0]}, expected {current[-1]}")
            raise _Unusable(f"{member.server.url}: {member.problem}")
        return generation

    async def _choose(self, affinity: str) -> _Member:
        """The server for the next request.

        Raises:
            ServerError: there is none, also after each was asked once more.
        """
        if not self._usable():
            # Hundreds of requests come here at once: one round of questions for all of them.
            if self._rescue is None or self._rescue.done():
                self._rescue = asyncio.create_task(self._ask_again())
            await asyncio.shield(self._rescue)
        usable = self._usable()
        if not usable:
            reasons = "; ".join(f"{member.server.url}: {member.problem}" for member in self._members)
            raise ServerError(
                "rollout.servers",
                f"none of {len(self._members)} can be used at policy version {self.version}: {reasons}. Restart the "
                "servers, and the run: it continues from its last checkpoint",
            )
        least = min(usable, key=lambda member: (len(member.running), member.place))
        home = self._home.get(affinity, least)
        if home.problem is not None or len(home.running) - len(least.running) > _SLACK:
            home = least
        self._home[affinity] = home
        return home

    def _usable(self) -> list[_Member]:
        return [member for member in self._members if member.problem is None]

    def _lose(self, member: _Member, problem: str) -> None:
        if member.problem is None:
            self.counts.servers_lost += 1
            member.problem = problem

    async def _ask_again(self) -> None:
        await asyncio.gather(*(self._take_back(member) for member in self._members))

    async def _take_back(self, member: _Member) -> None:
        """Use a server again, if it works and has the current weights."""
        try:
            version = (await member.server.info()).policy_version
        except ServerError:
            return
        if version != self.version:
            member.problem = f"it answers, but its weights are version {version}, expected {self.version}"
        # New weights may come while health is asked: then the version that was read says nothing any more.
        elif await member.server.health() and version == self.version:
            member.problem, member.failed_checks = None, 0

    def _enter(self) -> None:
        self._under_way += 1
        if not self._checks:
            self._checks = [asyncio.create_task(self._watch(member)) for member in self._members]

    def _leave(self) -> None:
        self._under_way -= 1
        if not self._under_way:
            for check in self._checks:
                check.cancel()
            self._checks = []

    async def _watch(self, member: _Member) -> None:
        while True:
            await asyncio.sleep(self._health_seconds)
            if await member.server.health():
                member.failed_checks = 0
                if member.problem is not None:
                    await self._take_back(member)
                continue
            member.failed_checks += 1
            if member.failed_checks >= _FAILED_CHECKS:
                self._lose(member, f"it failed {member.failed_checks} health checks in a row")
                for task in member.running:
                    task.cancel()
