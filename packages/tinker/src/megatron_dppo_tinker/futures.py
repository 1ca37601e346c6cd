"""Requests that wait for their turn, and their results until the client has fetched them."""

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_dppo_tinker.errors import RequestError

Result = bytes | dict[str, Any]
"""Protocol Buffers, or the values of a JSON object."""


@dataclass(eq=False)
class Request:
    """One request of a client, in the order in which it was received."""

    request_id: str
    run: Callable[[], Result] | None
    """Computes the result, in the thread of the model. None for a request that ``batch`` describes."""
    batch: Any = None
    """Requests with equal values of ``batch.key`` may be computed together."""
    num_bytes: int = 0
    """Size of what waits, then of the result."""
    result: Result | None = None
    is_fetched: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)


class RequestQueue:
    """Queue between the HTTP thread, which adds requests, and the thread of the model, which computes them."""

    def __init__(self, max_pending: int = 4096, max_results: int = 4096, max_bytes: int = 1 << 30) -> None:
        self._max_pending = max_pending
        self._max_results = max_results
        self._max_bytes = max_bytes
        self._lock = threading.Condition()
        self._pending: deque[Request] = deque()
        self.known: OrderedDict[str, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        """Add a request, unless too many wait.

        The same id again changes nothing: a client repeats what it has no answer to.
        """
        with self._lock:
            if request.request_id in self.known:
                return
            num_bytes = sum(each.num_bytes for each in self._pending)
            if len(self._pending) >= self._max_pending or (
                num_bytes and num_bytes + request.num_bytes > self._max_bytes
            ):
                count = len(self._pending)
                raise RequestError(f"{count} requests of {num_bytes} bytes are waiting; send this one again later", 429)
            self.known[request.request_id] = request
            self._pending.append(request)
            self._lock.notify()

    def get(self, request_id: str) -> Request:
        """Return a known request, whose result was not dropped."""
        with self._lock:
            request = self.known.get(request_id)
        if request is None:
            raise RequestError(f"the request {request_id!r:.120} is unknown, or its result is no longer kept", 404)
        return request

    def next(self, timeout: float) -> list[Request]:
        """Return the oldest request with all that can be computed with it; empty after ``timeout`` seconds."""
        with self._lock:
            if not self._pending and not self._lock.wait(timeout):
                return []
            if not self._pending:
                return []
            first = self._pending.popleft()
            if first.batch is None or first.batch.key is None:
                return [first]
            same = [each for each in self._pending if each.batch is not None and each.batch.key == first.batch.key]
            for each in same:
                self._pending.remove(each)
            return [first, *same]

    def finish(self, request: Request, result: Result) -> None:
        """Store a result, and drop the oldest ones beyond the limit."""
        with self._lock:
            request.result = result
            request.num_bytes = len(result) if isinstance(result, bytes) else 0
            # What the request holds, such as its data, is not needed any more.
            request.run = None
            request.batch = None
            self._drop_results()

    def _drop_results(self) -> None:
        """Drop results beyond the limits, the oldest first, and those that no client has fetched last."""
        done = [each for each in self.known.values() if each.result is not None]
        num_bytes = sum(each.num_bytes for each in done)
        count = len(done)
        for old in sorted(done, key=lambda each: not each.is_fetched):
            # The newest is not dropped: nobody can have fetched it yet.
            if (count <= self._max_results and num_bytes <= self._max_bytes) or old is done[-1]:
                return
            del self.known[old.request_id]
            count -= 1
            num_bytes -= old.num_bytes


def failure(message: str, *, is_user: bool) -> dict[str, Any]:
    """Return the result of a request that failed, as the SDK reads it."""
    return {"error": message, "category": "user" if is_user else "server"}
