"""An HTTP server in this process that plays recorded answers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web

T = TypeVar("T")
Play = Callable[["Call"], Awaitable[Any]]


@dataclass
class Call:
    """One request that came in."""

    path: str
    body: Any
    headers: Mapping[str, str]


@dataclass
class Stub:
    """Answers by path: JSON, ``(status, JSON)``, or a coroutine function that gives one of them.

    Paths that are not named get 404. ``calls`` holds what came in.
    """

    answers: dict[str, Any]
    url: str = ""
    calls: list[Call] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        call = Call(request.path, json.loads(raw) if raw else None, dict(request.headers))
        self.calls.append(call)
        answer = self.answers.get(request.path, (404, {"detail": "Not Found"}))
        if callable(answer):
            answer = await answer(call)
        status, body = answer if isinstance(answer, tuple) else (200, answer)
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status, text="" if body is None else text)

    @property
    def paths(self) -> list[str]:
        """Return the calls, in order."""
        return [call.path for call in self.calls]


@asynccontextmanager
async def serving(stub: Stub) -> Any:
    """The stub as a server on the loopback address."""
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{tail:.*}", stub.handle)
    runner = web.AppRunner(app, handler_cancellation=True)  # as real servers, which stop work that nobody waits for
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, shutdown_timeout=0.1)
    await site.start()
    host, port = runner.addresses[0][:2]
    stub.url = f"http://{host}:{port}"
    try:
        yield stub
    finally:
        await runner.cleanup()


def with_stub(stub: Stub, use: Callable[[str], Awaitable[T]]) -> T:
    """Run ``use(url)`` while the stub answers."""

    async def run() -> T:
        async with serving(stub):
            return await use(stub.url)

    return asyncio.run(run())


@contextmanager
def running(answers: dict[str, Any]) -> Iterator[Stub]:
    """The stub in a thread of its own, for other processes."""
    stub, ready, over = Stub(answers), threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with serving(stub):
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait(10)
    try:
        yield stub
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()
