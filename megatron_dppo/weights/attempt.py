"""One update of several inference servers, some of which may fail."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_dppo.errors import ServerError
from megatron_dppo_engines.server import InferenceServer, ServerInfo

RETRY_SECONDS = 1.0
"""Pause between two calls to a server that does not respond."""


@dataclass(frozen=True)
class SyncResult:
    """Outcome of one attempt."""

    version: int
    good: dict[str, ServerInfo]
    """Servers that have exactly this version and generate, by URL."""
    failed: dict[str, str] = field(default_factory=dict)
    """Reasons of the servers that responded but did not get the version, by URL."""
    absent: dict[str, str] = field(default_factory=dict)
    """Errors of the servers that did not respond at all, by URL."""
    notes: dict[str, str] = field(default_factory=dict)
    """Parts of good servers' weights that could not be proved byte by byte, by URL."""


class Attempt:
    """State of one update of several servers; those in ``synced`` have these weights already and are not called."""

    def __init__(self, version: int, synced: Mapping[str, ServerInfo]) -> None:
        self.version = version
        self.synced = synced
        self.infos: dict[str, ServerInfo] = dict(synced)
        self.failed: dict[str, str] = {}
        self.absent: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        self._errors: dict[str, ServerError] = {}

    def remaining(self, servers: Sequence[InferenceServer]) -> list[InferenceServer]:
        """Return the servers that still need the weights and have not failed."""
        excluded = self.failed.keys() | self.absent.keys() | self.synced.keys()
        return [server for server in servers if server.url not in excluded]

    async def call_each(
        self,
        servers: Sequence[InferenceServer],
        call: Callable[[InferenceServer], Awaitable[object]],
        *,
        absent: bool = False,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        """Call all servers at once; record failures and each ``ServerInfo`` that a call returns.

        A server that fails is recorded as failed, or as ``absent``. ``on_failure`` is called at each failure, while
        other calls may still be in flight.
        """

        async def call_one(server: InferenceServer) -> object:
            result = await catch_server_error(call(server))
            if isinstance(result, ServerError):
                self._errors.setdefault(server.url, result)
                if on_failure is not None:
                    on_failure()
            return result

        results = await asyncio.gather(*(call_one(server) for server in servers))
        for server, result in zip(servers, results, strict=True):
            if isinstance(result, ServerError):
                (self.absent if absent else self.failed).setdefault(server.url, str(result))
            elif isinstance(result, ServerInfo):
                self.infos[server.url] = result

    def fail_all(self, servers: Sequence[InferenceServer], reason: str) -> None:
        """Record the same reason for each server that has not failed yet."""
        for server in servers:
            self.failed.setdefault(server.url, reason)

    def find_culprits(self) -> set[str]:
        """Return the servers that may have made others fail: those without a response, else the first that failed."""
        unresponsive = {url for url, error in self._errors.items() if error.status is None}
        # ``_errors`` is in the order of the failures.
        return unresponsive or set(list(self._errors)[:1])

    def result(self) -> SyncResult:
        """Return the outcome."""
        excluded = self.failed.keys() | self.absent.keys()
        good = {url: info for url, info in self.infos.items() if url not in excluded}
        return SyncResult(self.version, good, self.failed, self.absent, self.notes)


async def catch_server_error(call: Awaitable[object]) -> object:
    """Return the result of a call, or the ``ServerError`` that it raises."""
    try:
        return await call
    except ServerError as error:
        return error


async def call_all(
    servers: Sequence[InferenceServer], call: Callable[[InferenceServer], Awaitable[object]]
) -> dict[str, object]:
    """Call all servers at once and return the results, or the ``ServerError``s that were raised, by URL."""
    results = await asyncio.gather(*(catch_server_error(call(server)) for server in servers))
    return {server.url: result for server, result in zip(servers, results, strict=True)}


async def wait_for_any(servers: Sequence[InferenceServer], patience: float) -> None:
    """Wait until one of the servers responds, or for ``patience`` seconds."""

    async def wait_for(server: InferenceServer) -> None:
        while not isinstance(await catch_server_error(server.info()), ServerInfo):
            await asyncio.sleep(RETRY_SECONDS)

    tasks = [asyncio.create_task(wait_for(server)) for server in servers]
    await asyncio.wait(tasks, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
