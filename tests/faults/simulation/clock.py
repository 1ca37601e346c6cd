"""An event loop whose time is a number: nothing waits, and the same events come in the same order each time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stuck(Exception):
    """Nothing is left that could happen, or more happens than in any run that ends."""


class Killed(KeyboardInterrupt):
    """``kill -9`` of the trainer. asyncio lets a KeyboardInterrupt of a callback out of the loop at once."""


class _Jump(selectors.SelectSelector):
    """Waits by setting the clock to when the next timer is due."""

    def __init__(self, longest: float, most_rounds: int) -> None:
        super().__init__()
        self.now, self.rounds = 0.0, 0
        self._longest, self._most_rounds = longest, most_rounds

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stuck(f"deadlock at {self.now:.3f} s: everybody waits, and no timer is set")
        self.rounds += 1
        if self.rounds > self._most_rounds:
            raise Stuck(f"livelock at {self.now:.3f} s: {self.rounds} rounds of the event loop")
        if timeout > 0:
            self.now += timeout
            if self.now > self._longest:
                raise Stuck(f"the run did not end within {self._longest:g} s")
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs what is ready, then jumps to the next timer.

    Args:
        longest: virtual seconds that a run may take.
        most_rounds: rounds of the loop that a run may take.
    """

    def __init__(self, longest: float, most_rounds: int) -> None:
        self._jump = _Jump(longest, most_rounds)
        super().__init__(self._jump)
        self._clock_resolution = 1e-9
        self.failures: list[str] = []
        self.set_exception_handler(self._note)

    # No thread ever wakes this loop, so that it needs no pipe to itself.
    def _make_self_pipe(self) -> None:
        self._ssock = self._csock = None

    def _close_self_pipe(self) -> None:
        pass

    def _write_to_self(self) -> None:
        raise AssertionError("another thread called the simulated loop")

    def time(self) -> float:
        return self._jump.now

    def block(self, seconds: float) -> None:
        """The caller's thread works for so long; what is due meanwhile comes after it."""
        self._jump.now += seconds

    @property
    def rounds(self) -> int:
        """Rounds of the loop so far: the measure of how much happened."""
        return self._jump.rounds

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """In place of a thread: what the function gives; where that is a coroutine, what it gives in the end."""
        result = func(*args)
        if asyncio.iscoroutine(result):
            return self.create_task(result)
        future = self.create_future()
        future.set_result(result)
        return future

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return or raise the result of the coroutine; everything else goes on beside it until then."""
        return self.run_until_complete(coroutine)

    def cancel_all(self) -> None:
        """Cancel every task, and let them end."""
        for _ in range(5):
            tasks = asyncio.all_tasks(self)
            if not tasks:
                return
            for task in tasks:
                task.cancel()
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.failures.append(f"{context.get('message')}: {error!r}")
