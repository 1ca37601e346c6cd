"""The HTTP server that agents call: OpenAI's chat completions and completions, and rewards; a key for each episode."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import math
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from megatron_dppo.engines.agents.episode import Episode
from megatron_dppo.engines.agents.replies import MODEL, chunks, whole
from megatron_dppo.engines.agents.requests import AgentRequest, CallError, read_chat, read_completion
from megatron_dppo.engines.servers.responder import LoopThread

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Endpoint:
    """Listens from the first episode on, in a thread of its own, until ``close``.

    Args:
        host: address; the port is a free one.
        max_body_bytes: longest body of a call.
    """

    def __init__(self, host: str, max_body_bytes: int) -> None:
        self._host, self._max_body_bytes = host, max_body_bytes
        self._episodes: dict[bytes, Episode] = {}
        self._thread: LoopThread | None = None
        self._runner: web.AppRunner | None = None
        self._port = 0

    @property
    def base_url(self) -> str:
        """What agents are given."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}/v1"

    def open(self, episode: Episode) -> str:
        """A key for an episode. Start listening if that has not begun.

        Raises:
            OSError: the address cannot be listened at.
        """
        if self._thread is None:
            thread = LoopThread("agents")
            try:
                thread.run(self._listen())
            except BaseException:
                thread.close()
                raise
            self._thread = thread
        key = f"sk-{secrets.token_urlsafe(32)}"
        self._episodes[_digest(key)] = episode
        return key

    def forget(self, key: str) -> None:
        """The episode has ended: its key is refused from here on."""
        del self._episodes[_digest(key)]

    def close(self) -> None:
        """Stop listening."""
        thread, self._thread = self._thread, None
        if thread is not None and self._runner is not None:
            thread.run(self._runner.cleanup())
            thread.close()

    async def _listen(self) -> None:
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[_errors_as_json])
        app.add_routes(
            [
                web.post("/v1/chat/completions", lambda request: self._answer(request, read_chat)),
                web.post("/v1/completions", lambda request: self._answer(request, read_completion)),
                web.post("/v1/reward", self._reward),
                web.get("/v1/models", self._models),
            ]
        )
        # No access log: it would hold nothing that a run needs.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, 0)
        await site.start()
        self._port = self._runner.addresses[0][1]

    def _episode(self, request: web.Request) -> Episode:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        given, found = _digest(key.strip()), None
        for digest, episode in list(self._episodes.items()):  # each in the same time, whichever it is
            found = episode if hmac.compare_digest(digest, given) else found
        if scheme.lower() != "bearer" or found is None:
            raise CallError("the API key is not that of a running episode", 401, "invalid_api_key")
        return found

    async def _answer(self, request: web.Request, read: Callable[[Any], AgentRequest]) -> web.StreamResponse:
        episode = self._episode(request)
        call = read(await _json(request))
        answer = await _in_its_loop(episode, episode.answer(call))
        if not call.stream:
            return web.json_response(whole(answer))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for chunk in chunks(answer):
            await response.write(chunk)
        await response.write_eof()
        return response

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        episode, body = self._episode(request), await _json(request)
        value = body.get("reward") if isinstance(body, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise CallError(f'expected {{"reward": NUMBER}}, got {body!r:.200}')
        episode.reward = float(value)
        return web.json_response({"reward": episode.reward})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._episode(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megatron_dppo"}
        return web.json_response({"object": "list", "data": [model]})


async def _in_its_loop(episode: Episode, coroutine: Any) -> Any:
    """Run in the event loop that the episode's samples belong to."""
    try:
        future = asyncio.run_coroutine_threadsafe(coroutine, episode.loop)
    except RuntimeError as error:  # the loop is closed
        coroutine.close()
        raise CallError("the episode has ended", 503, "episode_over") from error
    return await asyncio.wrap_future(future)


async def _json(request: web.Request) -> Any:
    try:
        return json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise CallError(f"the body is no JSON: {error}") from error


@web.middleware
async def _errors_as_json(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except CallError as error:
        return web.json_response(error.body, status=error.status)
    except web.HTTPException as error:
        refused = CallError(f"{request.method} {request.path}: {error.text or error.reason}", error.status)
        return web.json_response(refused.body, status=error.status)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
