"""An event loop in a thread of its own, for callers that are not asynchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for any thread until ``close``."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._started: set[Future[Any]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns or raises; it is cancelled when the caller is interrupted."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # of no effect when it was the coroutine that raised
            raise

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that deals with its own errors; do not wait for it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        self._started.add(future)  # the loop itself holds its tasks only weakly
        future.add_done_callback(self._started.discard)

    def cancel(self) -> None:
        """Cancel what still runs, and wait until it has ended."""
        if self._thread.is_alive():
            self.run(_cancel_all())

    def close(self) -> None:
        """Cancel what still runs, and end the thread."""
        if self._thread.is_alive():
            self.run(_cancel_all())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
