"""One update of several inference servers, some of which may fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_dppo.errors import ServerError
from megatron_dppo.rollout.server import InferenceServer, ServerInfo

_ASK_AGAIN_SECONDS = 1.0
"""Between two questions to a server that does not answer."""


@dataclass(frozen=True)
class SyncResult:
    """What became of one attempt."""

    version: int
    good: dict[str, ServerInfo]
    """by URL: the servers that have exactly this version, and generate"""
    failed: dict[str, str] = field(default_factory=dict)
    """by URL: those that were there and did not get it, and why"""
    absent: dict[str, str] = field(default_factory=dict)
    """by URL: those that did not answer at all"""
    notes: dict[str, str] = field(default_factory=dict)
    """by URL: of good ones, what of their weights could not be proved byte by byte"""


class Attempt:
    """An update of several servers at once, step by step: which of them are still good.

    Args:
        version: of the weights that they are to get.
        kept: by URL: servers that have these weights by an attempt before, and are left as they are.
    """

    def __init__(self, version: int, kept: Mapping[str, ServerInfo]) -> None:
        self.version, self.kept = version, kept
        self.infos: dict[str, ServerInfo] = dict(kept)
        self.failed: dict[str, str] = {}
        self.absent: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        self._errors: dict[str, ServerError] = {}

    def left(self, servers: Sequence[InferenceServer]) -> list[InferenceServer]:
        """Those that are to get the weights and have not failed."""
        gone = self.failed.keys() | self.absent.keys() | self.kept.keys()
        return [s for s in servers if s.url not in gone]

    async def each(
        self,
        servers: Sequence[InferenceServer],
        call: Callable[[InferenceServer], Awaitable[object]],
        *,
        absent: bool = False,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        """Call all of them at once; note who fails, and what they say of themselves.

        Args:
            servers: whom.
            call: what.
            absent: whether a failure means that nobody is there.
            on_failure: called at each failure, while others may still be under way.
        """

        async def one(server: InferenceServer) -> object:
            answer = await caught(call(server))
            if isinstance(answer, ServerError):
                self._errors.setdefault(server.url, answer)
                if on_failure is not None:
                    on_failure()
            return answer

        answers = await asyncio.gather(*(one(server) for server in servers))
        for server, answer in zip(servers, answers, strict=True):
            if isinstance(answer, ServerError):
                (self.absent if absent else self.failed).setdefault(server.url, str(answer))
            elif isinstance(answer, ServerInfo):
                self.infos[server.url] = answer

    def fail_all(self, servers: Sequence[InferenceServer], reason: str) -> None:
        """Note the same reason for each that has none yet."""
        for server in servers:
            self.failed.setdefault(server.url, reason)

    def culprits(self) -> set[str]:
        """Who may have made the others fail: those that gave no answer, or else the one that failed first."""
        silent = {url for url, error in self._errors.items() if error.status is None}
        return silent or set(list(self._errors)[:1])

    def result(self) -> SyncResult:
        """What became of it."""
        gone = self.failed.keys() | self.absent.keys()
        good = {url: info for url, info in self.infos.items() if url not in gone}
        return SyncResult(self.version, good, self.failed, self.absent, self.notes)


async def caught(call: Awaitable[object]) -> object:
    """The call's result; a ``ServerError`` is returned, not raised."""
    try:
        return await call
    except ServerError as error:
        return error


async def ask_each(
    servers: Sequence[InferenceServer], call: Callable[[InferenceServer], Awaitable[object]]
) -> dict[str, object]:
    """By URL: what the call of each gives, all at once; a ``ServerError`` is in its place, not raised."""
    answers = await asyncio.gather(*(caught(call(server)) for server in servers))
    return {server.url: answer for server, answer in zip(servers, answers, strict=True)}


async def wait_for_one(servers: Sequence[InferenceServer], patience: float) -> None:
    """Until one of them says something of itself, or for this many seconds."""

    async def answer(server: InferenceServer) -> None:
        while not isinstance(await caught(server.info()), ServerInfo):
            await asyncio.sleep(_ASK_AGAIN_SECONDS)

    tasks = [asyncio.create_task(answer(server)) for server in servers]
    await asyncio.wait(tasks, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
