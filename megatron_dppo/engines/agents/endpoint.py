"""HTTP endpoint for agents: OpenAI's chat completions and completions, and rewards, with a key for each episode."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import math
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from aiohttp import web

from megatron_dppo.engines.agents.episode import AgentResponse, Episode
from megatron_dppo.engines.agents.request_bodies import AgentRequest, CallError, read_chat, read_completion
from megatron_dppo.engines.agents.response_bodies import MODEL, response_body, stream_events
from megatron_dppo.engines.servers.responder import LoopThread

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Endpoint:
    """HTTP server in its own thread, from the first episode until ``close``.

    Args:
        host: address to listen on; the port is a free one.
        max_body_bytes: maximum size of a request body.
    """

    def __init__(self, host: str, max_body_bytes: int) -> None:
        self._host = host
        self._max_body_bytes = max_body_bytes
        self._episodes: dict[bytes, Episode] = {}
        """Running episodes, by the digest of their keys."""
        self._thread: LoopThread | None = None
        self._runner: web.AppRunner | None = None
        self._port = 0

    @property
    def base_url(self) -> str:
        """Base URL for OpenAI clients."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}/v1"

    def register(self, episode: Episode) -> str:
        """Return the API key of an episode; start listening if this is the first one.

        Raises:
            OSError: the server cannot listen on the address.
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

    def unregister(self, key: str) -> None:
        """Reject the key of an episode that has ended."""
        del self._episodes[_digest(key)]

    def close(self) -> None:
        """Stop listening."""
        thread = self._thread
        self._thread = None
        if thread is not None and self._runner is not None:
            thread.run(self._runner.cleanup())
            thread.close()

    async def _listen(self) -> None:
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[_errors_as_json])
        app.add_routes(
            [
                web.post("/v1/chat/completions", lambda request: self._respond(request, read_chat)),
                web.post("/v1/completions", lambda request: self._respond(request, read_completion)),
                web.post("/v1/reward", self._reward),
                web.get("/v1/models", self._models),
            ]
        )
        # No access log: it would contain nothing that a run needs.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, 0)
        await site.start()
        self._port = self._runner.addresses[0][1]

    def _episode(self, request: web.Request) -> Episode:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        given = _digest(key.strip())
        match = None
        # Compare with every digest in constant time, so that timing reveals nothing about the keys.
        for digest, episode in list(self._episodes.items()):
            match = episode if hmac.compare_digest(digest, given) else match
        if scheme.lower() != "bearer" or match is None:
            raise CallError("the API key is not that of a running episode", 401, "invalid_api_key")
        return match

    async def _respond(self, request: web.Request, read: Callable[[object], AgentRequest]) -> web.StreamResponse:
        episode = self._episode(request)
        call = read(await _json(request))
        response = await _run_in_episode_loop(episode, episode.respond(call))
        if not call.stream:
            return web.json_response(response_body(response))
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await stream.prepare(request)
        for event in stream_events(response):
            await stream.write(event)
        await stream.write_eof()
        return stream

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        episode = self._episode(request)
        body = await _json(request)
        value = body.get("reward") if isinstance(body, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise CallError(f'expected {{"reward": NUMBER}}, got {body!r:.200}')
        episode.reward = float(value)
        return web.json_response({"reward": episode.reward})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._episode(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megatron_dppo"}
        return web.json_response({"object": "list", "data": [model]})


async def _run_in_episode_loop(episode: Episode, coroutine: Coroutine[Any, Any, AgentResponse]) -> AgentResponse:
    """Run a coroutine in the event loop that the episode's samples belong to."""
    try:
        future = asyncio.run_coroutine_threadsafe(coroutine, episode.loop)
    except RuntimeError as error:  # the loop is closed
        coroutine.close()
        raise CallError("the episode has ended", 503, "episode_over") from error
    return await asyncio.wrap_future(future)


async def _json(request: web.Request) -> object:
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
        rejected = CallError(f"{request.method} {request.path}: {error.text or error.reason}", error.status)
        return web.json_response(rejected.body, status=error.status)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
