"""Requests over several servers: to whom each goes, what becomes of it when a server fails, and which weights count.

Belongs to one event loop, and no method but ``generate`` and ``abort`` waits for anything, so that no locks are needed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from megatron_dppo.engines.servers.member import Gate, PooledServer, Watch
from megatron_dppo.errors import ContractViolation, NoUsableServer, ServerError
from megatron_dppo.rollout.server import GenerateCall, GenerateRequest, Generation, InferenceServer

_ASK_AGAIN = 1.0
"""Seconds between two rounds of questions when no server is left."""
_PAUSE_SECONDS = 30.0
_ABORT_AGAIN = 0.2
"""Seconds between two tries to stop a request: a server does not know one that it has not queued yet."""
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
    breaches: int = 0
    """answers that broke the contract"""
    messages: list[str] = field(default_factory=list)
    """each broken contract and each lost server, in words"""


class _Unusable(Exception):
    """The answer of a server is not to be had, or not to be used."""


class ServerPool:
    """Dispatches requests to the least loaded server; those with one affinity go to one server where that is fair.

    Args:
        servers: at least one; they are closed by the caller.
        ask: how they are asked.
        max_in_flight: requests that are under way at a time; more wait their turn, in order.
        health_seconds: between two checks of each server while requests are under way.
        patience_seconds: without a good answer from any server, after which a request that no server takes has failed.
        first: which server gets the first request. Each trainer rank has a pool of its own over the same servers, and
            sees only its own load: with different numbers they do not all begin with server 0.
    """

    def __init__(
        self,
        servers: Sequence[InferenceServer],
        ask: GenerateCall,
        *,
        max_in_flight: int,
        health_seconds: float,
        patience_seconds: float = 60.0,
        first: int = 0,
    ) -> None:
        if not servers:
            raise ValueError("ServerPool needs at least one server")
        self.counts = PoolCounts()
        self._ask_server, self._patience = ask, patience_seconds
        self._members = [PooledServer(server, (i - first) % len(servers)) for i, server in enumerate(servers)]
        self._slots = asyncio.Semaphore(max_in_flight)
        self._watch = Watch(self._members, health_seconds, self._lose, lambda: self.version)
        self._versions: list[int] = []
        self._gate = Gate()
        self._home: dict[str, PooledServer] = {}
        self._sent: dict[str, tuple[PooledServer, str]] = {}
        self._last_good = float("-inf")

    @property
    def version(self) -> int:
        """Of the weights that requests are answered with; -1 before the first ``use_version``."""
        return self._versions[-1] if self._versions else -1

    def use_version(self, version: int, urls: Iterable[str]) -> None:
        """From now on these servers, which have exactly ``version``, are used; the others not before the next sync.

        Call it after each publish, when the servers work again.

        Raises:
            ValueError: a URL that is none of the servers'.
        """
        members = {member.url: member for member in self._members}
        good = {url.rstrip("/") for url in urls}
        if unknown := sorted(good - members.keys()):
            raise ValueError(f"use_version: {unknown[0]!r} is not a server of this pool; it has {sorted(members)}")
        if version != self.version:
            self._versions.append(version)
        self._home.clear()  # new weights leave no prefix cache
        for url, member in members.items():
            member.welcome(None if url in good else f"the weight sync did not bring it to version {version}")

    async def pause(self) -> None:
        """Take all requests back from the servers: they return what they have, and nothing is sent until ``proceed``.

        Servers do not sample across a change of the weights: one that did would report the experts of the new weights
        for tokens of the old ones. A request that a server does not give back within ``_PAUSE_SECONDS`` stays there.
        """
        self._gate.hold()
        self._watch.resting = True
        end = self._now() + _PAUSE_SECONDS
        while self._sent and self._now() < end:
            await self.abort(list(self._sent))
            again = self._now() + _ABORT_AGAIN
            while self._sent and self._now() < again:
                await asyncio.sleep(_ABORT_AGAIN / 20)

    def proceed(self) -> None:
        """Send requests again, after ``pause``."""
        self._gate.release()
        self._watch.resting = not self._gate.is_open

    async def generate(self, request: GenerateRequest, affinity: str) -> Generation:
        """Continue a sequence on some server.

        A server that gives no answer, or one from weights that were not current at any time since the request was
        sent, is not used before it works with the current weights; one that is overloaded rests; one whose answers
        break the contract twice is out until the next ``use_version``. The request goes as a whole to another one.

        Args:
            request: ``request_id`` is unique among those of all pools over these servers.
            affinity: the same for requests with a common prefix, as siblings of one prompt have.

        Raises:
            ServerError: a server refuses the request, or no server is usable; then it lists them all, and is a
                ``NoUsableServer`` unless each of them broke the contract too often.
            RuntimeError: before the first ``use_version``.
        """
        if not self._versions:
            raise RuntimeError("ServerPool.generate before the first use_version: no server has weights")
        async with self._slots:
            self._watch.enter()
            try:
                return await self._dispatch(request, affinity)
            finally:
                self._sent.pop(request.request_id, None)
                self._watch.leave()

    def was_sent(self, request_id: str) -> bool:
        """Whether a server has the request now; False while it waits its turn, and afterwards."""
        return request_id in self._sent

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Stop some requests that were sent: their ``generate`` returns what they have. Others are left alone.

        A request that a server has not queued yet when this arrives goes on; call again until all have returned.
        """

        async def stop(member: PooledServer, name: str) -> None:
            with contextlib.suppress(ServerError):  # what is wrong with the server shows in the request itself
                await member.server.abort(name)

        await asyncio.gather(*(stop(*self._sent[name]) for name in request_ids if name in self._sent))

    async def _dispatch(self, request: GenerateRequest, affinity: str) -> Generation:
        failed: set[PooledServer] = set()
        began: float | None = None
        attempt = 0
        while True:
            await self._gate.passed()
            member = await self._choose(affinity, failed, began)
            # An earlier try may still run on a server that hangs: a name of its own for each.
            sent = replace(request, request_id=f"{request.request_id}~{attempt}") if attempt else request
            self._sent[request.request_id] = (member, sent.request_id)
            try:
                return await self._ask(member, sent)
            except _Unusable as error:
                self._sent.pop(request.request_id, None)
                self.counts.retries += 1
                problem = str(error)
            attempt += 1
            failed.add(member)
            began = self._now() if began is None else began
            # Servers that come back and fail again and again must end, too.
            if attempt > 2 * len(self._members) and self._now() >= self._give_up(began):
                states = "; ".join(m.state() for m in self._members)
                raise ServerError(
                    "rollout.servers",
                    f"request {request.request_id} failed {attempt} times; the last time: {problem}. Servers: {states}",
                )

    async def _ask(self, member: PooledServer, request: GenerateRequest) -> Generation:
        known, losses = len(self._versions) - 1, member.losses
        task = asyncio.ensure_future(self._ask_server(member.server, request))
        member.running.add(task)
        try:
            await asyncio.wait({task})
        finally:  # also when the caller is cancelled
            member.running.discard(task)
            task.cancel()
        # Given up meanwhile: what arrives at the last moment is not used either.
        if task.cancelled() or member.losses != losses:
            _ = task.cancelled() or task.exception()
            raise _Unusable(member.state())
        try:
            generation = task.result()
        except ServerError as error:
            self._judge(member, error)
            raise _Unusable(str(error)) from None
        current = self._versions[known:]
        wrong = sorted({span.policy_version for span in generation.versions} - set(current))
        if wrong:
            self._lose(member, f"it answered with weights of version {wrong[0]}, expected {current[-1]}")
            raise _Unusable(member.state())
        member.failures, self._last_good = 0, self._now()
        return generation

    def _judge(self, member: PooledServer, error: ServerError) -> None:
        """What a failed request means for its server.

        Raises:
            ServerError: nothing: the request itself is wrong.
        """
        if isinstance(error, ContractViolation):
            self.counts.breaches += 1
            self.counts.messages.append(str(error))
            member.rest(self._now(), error.detail)
            member.breaches.append(error.detail)
            if member.banned:
                problem = f"it broke the contract {len(member.breaches)} times since the last sync, the last time: "
                self._lose(member, problem + error.detail, final=True)
        elif error.is_transient:
            member.rest(self._now(), str(error), error.retry_after)
        elif error.status is None:
            self._lose(member, error.detail)
        else:
            raise error

    async def _choose(self, affinity: str, failed: set[PooledServer], began: float | None) -> PooledServer:
        """The server for the next request: one that it has not failed on, where there is one.

        Args:
            affinity: see ``generate``.
            failed: servers that have failed the request.
            began: when it failed first; None = it did not.

        Raises:
            ServerError: there is none, also after each was asked again, as long as the patience lasts.
        """
        began = self._now() if began is None else began
        while True:
            now = self._now()
            usable = self._usable()
            if ready := [member for member in usable if member.rest_until <= now]:
                return self._pick(affinity, [m for m in ready if m not in failed] or ready)
            wait = min((member.rest_until for member in usable), default=now + _ASK_AGAIN) - now
            if not usable:
                await self._watch.ask_again()
                if self._usable():
                    continue
            left = self._give_up(began) - self._now()
            if left <= 0 or all(member.final for member in self._members):
                raise self._nobody()
            await asyncio.sleep(min(wait, left))

    def _pick(self, affinity: str, ready: list[PooledServer]) -> PooledServer:
        least = min(ready, key=lambda member: (len(member.running), member.place))
        home = self._home.get(affinity, least)
        if home not in ready or len(home.running) - len(least.running) > _SLACK:
            home = least
        self._home[affinity] = home
        return home

    def _nobody(self) -> ServerError:
        kind = ServerError if all(member.banned for member in self._members) else NoUsableServer
        return kind(
            "rollout.servers",
            f"none of {len(self._members)} can be used at policy version {self.version}: "
            f"{'; '.join(member.state() for member in self._members)}. Restart the "
            "servers, and the run: it continues from its last checkpoint",
        )

    def _give_up(self, began: float) -> float:
        """When a request that has failed since ``began`` is given up."""
        return max(began, self._last_good) + self._patience

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _usable(self) -> list[PooledServer]:
        return [member for member in self._members if member.problem is None]

    def _lose(self, member: PooledServer, problem: str, *, final: bool = False) -> None:
        member.rest(self._now(), problem)
        if member.lose(problem, final=final):
            self.counts.servers_lost += 1
            self.counts.messages.append(f"{member.url} is not used any more: {problem}")
