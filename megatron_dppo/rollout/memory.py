"""The device memory of a server that shares its GPUs with the trainer: given up, and taken again in two parts.

SGLang ends when memory is taken that was not given up, or given up twice, and does not say which it is. So the state
stands in the name of the weights, which outlives the trainer. The name changes before the call: a trainer that is
killed in the instant between leaves a server that ends at the next call, and is started again; with the opposite order
it would be so during the whole call.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Literal

from megatron_dppo.errors import ConfigError, ServerError
from megatron_dppo.rollout.replies import INCOMPLETE

RELEASED = "released"
"""Weights and key-value cache have no memory."""
CACHE_RELEASED = "incomplete, cache released"
"""The weights have memory again, and anything in it."""
Part = Literal["weights", "kv_cache"]
"""Tags of both engines."""


class ReleasedMemory(ABC):
    """The part of a server's client that releases its memory; an engine adds its own calls."""

    url: str
    _paused = False
    _cache_released = False
    """by ``wake_weights``: whether the cache is to be woken before anything is generated"""

    async def release_memory(self) -> None:
        """See ``InferenceServer``.

        Raises:
            ConfigError: the server was started without what this takes.
            ServerError: it refuses, and has all that it had; or it does not answer, and may have released it.
        """
        if (flag := await self._missing_flag()) is not None:
            raise ConfigError(
                f"{self.url} cannot release its memory, as rollout.servers.colocated = true needs; start it with "
                f"{flag}, or with megatron-dppo serve"
            )
        before = await self._weight_version()
        if before == RELEASED:
            return
        await self._stop()
        self._paused = True
        if before == CACHE_RELEASED:  # both parts are released together
            await self._take("kv_cache", INCOMPLETE, before)
            before = INCOMPLETE
        await self._renamed(RELEASED, before, self._release_all)
        self._cache_released = False

    async def wake_weights(self) -> None:
        """See ``InferenceServer``."""
        name = await self._weight_version()
        if name == RELEASED:
            await self._take("weights", CACHE_RELEASED, name)
        self._cache_released = name in (RELEASED, CACHE_RELEASED)

    async def _wake_cache(self) -> None:
        """Take the memory of the cache, if it is missing."""
        if self._cache_released:
            await self._take("kv_cache", INCOMPLETE, CACHE_RELEASED)
            self._cache_released = False

    @property
    def _unfinished(self) -> str:
        """The name of weights that are being changed."""
        return CACHE_RELEASED if self._cache_released else INCOMPLETE

    async def _take(self, part: Part, name: str, before: str) -> None:
        await self._renamed(name, before, lambda: self._take_part(part))

    async def _renamed(self, name: str, before: str, call: Callable[[], Awaitable[None]]) -> None:
        """The call under its new name; the name before again when the server refuses."""
        await self._set_version(name)
        try:
            await call()
        except ServerError as error:
            if error.status is not None:
                with contextlib.suppress(ServerError):  # the first error is the one to tell
                    await self._set_version(before)
            raise

    @abstractmethod
    async def _missing_flag(self) -> str | None:
        """What the server should have been started with; None = nothing is missing."""

    @abstractmethod
    async def _stop(self) -> None:
        """End all requests, and generate nothing until ``resume``."""

    @abstractmethod
    async def _release_all(self) -> None: ...

    @abstractmethod
    async def _take_part(self, part: Part) -> None: ...

    @abstractmethod
    async def _weight_version(self) -> str: ...

    @abstractmethod
    async def _set_version(self, name: str) -> None: ...
