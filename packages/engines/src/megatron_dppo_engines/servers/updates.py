"""Weight updates from a folder and memory release, as far as SGLang and vLLM have them in common."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

from megatron_dppo_engines.errors import ConfigError, ServerError
from megatron_dppo_engines.server import InferenceServer
from megatron_dppo_engines.servers.fields import INCOMPLETE
from megatron_dppo_engines.weight_files import ADAPTER_FILE, find_weight_files, open_weight_file

# A server carries its state in its weight version, so that any client, also one of a later run, can continue from it.
RELEASED = "released"
"""Version of a server whose weights and key-value cache have no memory."""
CACHE_RELEASED = "incomplete, cache released"
"""Version of a server whose weights have memory with undefined content, and whose cache has none."""
ADAPTER = "megatron_dppo"
"""Name of the run's LoRA adapter on the servers."""

MemoryTag = Literal["weights", "kv_cache"]
"""Part of a server's memory, by the name that both engines give it."""


def check_weights(folder: Path) -> None:
    """Check that a folder has complete weights, before a server reads it.

    SGLang crashes on a truncated file, since its rollback reads the same folder again, and does not notice missing
    files. A stock vLLM is left without weights and crashes on the next request. A folder that is not on this machine
    passes.
    """
    if not folder.is_dir():
        return  # a path of the server's machine: the server reports itself if there is nothing
    for file in find_weight_files(folder, "the folder of new weights").files:
        open_weight_file(file)


def check_adapter(folder: Path) -> None:
    """Check that a folder has complete adapters, as ``check_weights`` does."""
    if folder.is_dir():
        open_weight_file(folder / ADAPTER_FILE)


class ServerUpdates(InferenceServer, ABC):
    """The part of a server's client that releases memory and updates from a folder; an engine adds its own calls."""

    _untouched_text: str
    """Part of the server's error text if it changed no weight."""
    _is_paused = False
    _is_cache_released = False
    """True if the cache needs memory before anything is generated; set by ``wake_weights``."""

    async def release_memory(self) -> None:
        """See ``InferenceServer``.

        Raises:
            ConfigError: The server was started without the flag that memory release needs.
            ServerError: The server refuses, and keeps its memory. Or it does not respond, and may have released it.
        """
        if (flag := await self._missing_flag()) is not None:
            raise ConfigError(
                f"{self.url} cannot release its memory, as rollout.servers.colocated = true needs; start it with "
                f"{flag}, or with megatron-dppo serve"
            )
        before = await self._weight_version()
        if before == RELEASED:
            return
        await self._abort_and_pause()
        self._is_paused = True
        if before == CACHE_RELEASED:  # both parts can be released only together
            await self._allocate_as("kv_cache", INCOMPLETE, before)
            before = INCOMPLETE
        await self._call_as(RELEASED, before, self._release_all)
        self._is_cache_released = False

    async def wake_weights(self) -> None:
        """See ``InferenceServer``."""
        version = await self._weight_version()
        if version == RELEASED:
            await self._allocate_as("weights", CACHE_RELEASED, version)
        self._is_cache_released = version in (RELEASED, CACHE_RELEASED)

    async def _wake_cache(self) -> None:
        if self._is_cache_released:
            await self._allocate_as("kv_cache", INCOMPLETE, CACHE_RELEASED)
            self._is_cache_released = False

    @property
    def _unfinished_version(self) -> str:
        """Version during a weight update."""
        return CACHE_RELEASED if self._is_cache_released else INCOMPLETE

    async def _allocate_as(self, tag: MemoryTag, version: str, before: str) -> None:
        await self._call_as(version, before, lambda: self._allocate(tag))

    async def _call_as(self, version: str, before: str, call: Callable[[], Awaitable[None]]) -> None:
        """Set the version, then make the call; restore the version ``before`` if the server refuses the call.

        The version comes first: if the trainer dies in between, no client takes the server for a usable one.
        """
        await self._set_version(version)
        try:
            await call()
        except ServerError as error:
            # With a status the server has refused the call. Without one it may have run it.
            if error.status is not None:
                with contextlib.suppress(ServerError):  # the first error is the one to report
                    await self._set_version(before)
            raise

    @abstractmethod
    async def _missing_flag(self) -> str | None:
        """Return the option that the server should have been started with; None if nothing is missing."""

    @abstractmethod
    async def _abort_and_pause(self) -> None:
        """Abort all requests and generate nothing until ``resume``."""

    @abstractmethod
    async def _release_all(self) -> None: ...

    @abstractmethod
    async def _allocate(self, tag: MemoryTag) -> None: ...

    @abstractmethod
    async def _weight_version(self) -> str: ...

    @abstractmethod
    async def _set_version(self, version: str) -> None: ...

    @abstractmethod
    async def _load_weights(self, folder: str) -> None: ...

    @abstractmethod
    async def _load_adapter(self, folder: str) -> None: ...

    @abstractmethod
    async def _finish_update(self, version: int) -> None: ...

    async def update_adapter(self, folder: str, version: int) -> None:
        """See ``InferenceServer``.

        Raises:
            RuntimeError: The server is not paused: it would respond with half of the new weights.
            CheckpointError: The folder is on this machine and incomplete; no request was sent.
        """
        if not self._is_paused:
            raise RuntimeError(f"{self.url}: update_adapter without pause")
        check_adapter(Path(folder))
        await self._set_version(self._unfinished_version)
        await self._load_adapter(folder)
        await self._finish_update(version)

    async def update_from_disk(self, folder: str, version: int) -> None:
        """See ``InferenceServer``. An error states if the old weights are still there."""
        check_weights(Path(folder))
        # Whoever paused the server also resumes it.
        if self._is_paused:
            return await self._load_folder(folder, version)
        await self.pause()
        try:
            await self._load_folder(folder, version)
        except ServerError:
            # If this fails too, the first error is the one to report.
            with contextlib.suppress(ServerError):
                await self.resume()
            raise
        await self.resume()

    async def _load_folder(self, folder: str, version: int) -> None:
        before = await self._weight_version()
        await self._set_version(self._unfinished_version)
        try:
            await self._load_weights(folder)
        except ServerError as error:
            # After a release of the memory there are no old weights.
            is_untouched = self._untouched_text in error.detail and not self._is_cache_released
            if is_untouched:
                await self._set_version(before)
            state = (
                f"the old weights, version {before!r}, are still served"
                if is_untouched
                else "its weights may be half old and half new: update it again or restart it"
            )
            raise ServerError(self.url, f"cannot load {folder!r}: {error.detail}; {state}", error.status) from error
        await self._finish_update(version)
