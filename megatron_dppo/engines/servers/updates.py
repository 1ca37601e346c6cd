"""Weight updates from a folder, and released memory: what SGLang and vLLM have in common."""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError, safe_open

from megatron_dppo.engines.servers.fields import INCOMPLETE
from megatron_dppo.errors import CheckpointError, ConfigError, ServerError

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


ADAPTER = "megatron_dppo"
"""What servers call the adapter of the run"""


def check_weights(folder: Path) -> None:
    """Refuse weights that a server would make damage with.

    Of a file that breaks off SGLang dies: its way back reads the same folder again. Missing files it does not notice.
    A stock vLLM is left without weights, and dies of the next request. A folder that is not on this machine passes.

    Raises:
        CheckpointError: a file is missing or breaks off.
    """
    if not folder.is_dir():
        return  # a path of the server's machine: it says itself that there is nothing
    index = folder / "model.safetensors.index.json"
    files = set(folder.glob("*.safetensors"))
    if index.is_file():
        files |= {folder / name for name in json.loads(index.read_text())["weight_map"].values()}
    for file in sorted(files):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is not a complete safetensors file: {error}") from error


class FolderUpdates(ReleasedMemory):
    """``update_from_disk`` of a server; an engine adds its own calls."""

    _untouched: str
    """stands in the server's message when it changed no weight"""

    @abstractmethod
    async def pause(self) -> None:
        """See ``InferenceServer``."""

    @abstractmethod
    async def resume(self) -> None:
        """See ``InferenceServer``."""

    @abstractmethod
    async def _read_folder(self, folder: str) -> None: ...

    @abstractmethod
    async def _read_adapter(self, folder: str) -> None: ...

    @abstractmethod
    async def _finish(self, version: int) -> None: ...

    async def update_adapter(self, folder: str, version: int) -> None:
        """See ``InferenceServer``.

        Raises:
            RuntimeError: not paused: requests would be answered with half of the new weights.
            CheckpointError: the folder is on this machine too, and incomplete; the server was not asked.
        """
        if not self._paused:
            raise RuntimeError(f"{self.url}: update_adapter without pause")
        check_weights(Path(folder))
        await self._set_version(self._unfinished)
        await self._read_adapter(folder)
        await self._finish(version)

    async def update_from_disk(self, folder: str, version: int) -> None:
        """See ``InferenceServer``.

        Raises:
            CheckpointError: the folder is on this machine too, and incomplete; the server was not asked.
            ServerError: not loaded; the message says whether the old weights are still there.
        """
        check_weights(Path(folder))
        if self._paused:
            return await self._load_folder(folder, version)
        await self.pause()
        try:
            await self._load_folder(folder, version)
        except ServerError:
            # When this fails too, the first error is the one to tell.
            with contextlib.suppress(ServerError):
                await self.resume()
            raise
        await self.resume()

    async def _load_folder(self, folder: str, version: int) -> None:
        before = await self._weight_version()
        await self._set_version(self._unfinished)
        try:
            await self._read_folder(folder)
        except ServerError as error:
            untouched = self._untouched in error.detail and not self._cache_released
            if untouched:
                await self._set_version(before)
            state = (
                f"the old weights, version {before!r}, are still served"
                if untouched
                else "its weights may be half old and half new: update it again or restart it"
            )
            raise ServerError(self.url, f"cannot load {folder!r}: {error.detail}; {state}", error.status) from error
        await self._finish(version)
