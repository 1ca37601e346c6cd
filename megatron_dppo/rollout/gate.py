"""A gate that requests pass one by one, and that several may hold shut at a time."""

from __future__ import annotations

import asyncio


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
