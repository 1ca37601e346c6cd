"""New weights or adapters for a server from a folder: what SGLang and vLLM have in common."""

from __future__ import annotations

import contextlib
import json
from abc import abstractmethod
from pathlib import Path

from safetensors import SafetensorError, safe_open

from megatron_dppo.errors import CheckpointError, ServerError
from megatron_dppo.rollout.memory import ReleasedMemory

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
