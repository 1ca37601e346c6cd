"""An HTTP proxy in front of a real server, in which a test can make that server lie, fail, hang or be slow."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web


@dataclass
class Exchange:
    """One call and the response of the real server; a corruption changes the response in place."""

    path: str
    request: Any
    """JSON body; None without a body."""
    status: int = 200
    answer: Any = None
    """JSON, or text if the body is not JSON."""


Before = Callable[[Exchange], Awaitable[bool]]
"""Hook before the server is called. It may change ``exchange.request`` in place.

True forwards the request; False returns ``exchange.answer`` without calling the server.
"""
Lie = Callable[[Exchange], None]
"""Hook after the server responds."""


class Proxy:
    """Proxy that forwards everything to ``target``; a context manager with its own thread.

    ``before`` and ``lie`` may be replaced at any time. ``calls`` counts by path.

    Example::

        def positive(exchange):
            if exchange.path == "/generate":
                for row in exchange.answer["meta_info"]["output_token_logprobs"]:
                    row[0] = 0.5

        with Proxy(engine.url, lie=positive) as proxy:
            ...  # give proxy.url to the run
    """

    def __init__(self, target: str, *, lie: Lie | None = None, before: Before | None = None) -> None:
        self.target = target
        self.lie = lie
        self.before = before
        self.url = ""
        self.calls: dict[str, int] = {}

    def __enter__(self) -> Proxy:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(self, *exception: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{tail:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, shutdown_timeout=0.1)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def _stop(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        self.calls[request.path] = self.calls.get(request.path, 0) + 1
        exchange = Exchange(request.path, json.loads(raw) if raw else None)
        if self.before is None or await self.before(exchange):
            if self.before is not None and raw:
                raw = json.dumps(exchange.request).encode()
            headers = {k: v for k, v in request.headers.items() if k.lower() in ("content-type", "authorization")}
            try:
                async with self._session.request(
                    request.method, self.target + request.path_qs, data=raw or None, headers=headers
                ) as response:
                    exchange.status, content = response.status, await response.read()
            except aiohttp.ClientError as error:
                return web.Response(status=502, text=str(error))
            try:
                exchange.answer = json.loads(content) if content else None
            except ValueError:
                exchange.answer = content.decode(errors="replace")
            if self.lie is not None and 200 <= exchange.status < 300:
                self.lie(exchange)
        answer = exchange.answer
        text = "" if answer is None else answer if isinstance(answer, str) else json.dumps(answer)
        return web.Response(status=exchange.status, text=text, content_type="application/json")
