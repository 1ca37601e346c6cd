"""Requests to scoring servers, one at a time or in batches, with retries and errors that never contain the key."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import aiohttp

from megatron_dppo.config.reward_options import ServerOptions
from megatron_dppo.errors import RewardError

_BUSY = (429, 502, 503, 504)
_FIRST_PAUSE_SECONDS = 0.1
_MAX_PAUSE_SECONDS = 2.0
_MAX_RESPONSE_BYTES = 1 << 26


class ServersUnreachable(Exception):
    """No server accepted the request, including at the last attempt."""


class BadResponse(Exception):
    """A server rejected the request, or its response is not what was requested."""


class ScoringServers:
    """One or several servers that take turns. Create it in any process and use it in one event loop."""

    def __init__(self, options: ServerOptions, table: str) -> None:
        self._urls = itertools.cycle(options.urls)
        self._count = len(options.urls)
        self._rounds = 1 + options.retries
        self._session: aiohttp.ClientSession | None = None
        self._key = os.environ.get(options.api_key_env, "") if options.api_key_env else ""
        if options.api_key_env and not self._key:
            raise RewardError(
                f"{table}.options.api_key_env = {options.api_key_env!r}: this environment variable is not set, or is "
                "empty. Export it, or remove api_key_env"
            )

    async def post(self, path: str, body: object) -> Any:
        """Return the JSON response of a server.

        Raises:
            ServersUnreachable: At every attempt, all servers were unreachable or busy.
            BadResponse: A server returned an error, or something other than JSON.
        """
        if self._session is None:
            # No time limit here: the caller enforces the limit of the sample.
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            self._session = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None))
        last_problem = ""
        attempts = self._rounds * self._count
        for attempt in range(attempts):
            if attempt and attempt % self._count == 0:  # Every server was tried once: pause before the next round.
                await asyncio.sleep(min(_MAX_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2 ** (attempt // self._count)))
            url = next(self._urls) + path
            try:
                async with self._session.post(url, json=body, allow_redirects=False) as response:
                    if response.status in _BUSY:
                        last_problem = f"{url} returned {response.status}"
                        continue
                    return self._read(url, response.status, await _content(response))
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError) as error:
                last_problem = f"{url} cannot be reached ({type(error).__name__})"
        raise ServersUnreachable(f"{last_problem}, at the last of {attempts} attempts")

    def _read(self, url: str, status: int, content: bytes) -> Any:
        if status != 200:
            text = content[:300].decode("utf-8", "replace")
            # A server may echo the request's header, so remove the key from the message.
            text = text.replace(self._key, "***") if self._key else text
            raise BadResponse(f"{url} returned {status}: {text}")
        try:
            return json.loads(content)
        except ValueError as error:
            raise BadResponse(f"{url} did not return JSON") from error


async def _content(response: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for part in response.content.iter_any():
        content += part
        if len(content) > _MAX_RESPONSE_BYTES:
            raise BadResponse(f"{response.url} returned more than {_MAX_RESPONSE_BYTES >> 20} MiB")
    return bytes(content)


_QuestionT = TypeVar("_QuestionT")
_ResultT = TypeVar("_ResultT")
_PendingQuestion = tuple[_QuestionT, "asyncio.Future[_ResultT]"]


class RequestBatcher(Generic[_QuestionT, _ResultT]):
    """Collects the questions of one event-loop iteration and sends them in requests of at most ``size``.

    A request with a bad response (``BadResponse`` of ``send``) is split in two and each half is sent again, until the
    question at fault is alone. A request is canceled when nobody waits for any of its results.
    """

    def __init__(self, send: Callable[[Sequence[_QuestionT]], Awaitable[Sequence[_ResultT]]], size: int) -> None:
        self._send = send
        self._size = size
        self._waiting: list[_PendingQuestion[_QuestionT, _ResultT]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(self, question: _QuestionT) -> _ResultT:
        """Return the result for one question."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            # The first question schedules the send after all other questions of this iteration.
            loop.call_soon(self._start)
        future: asyncio.Future[_ResultT] = loop.create_future()
        self._waiting.append((question, future))
        return await future

    def _start(self) -> None:
        waiting = self._waiting
        self._waiting = []
        for first in range(0, len(waiting), self._size):
            part = waiting[first : first + self._size]
            task = asyncio.create_task(self._run(part))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            for _, future in part:
                future.add_done_callback(partial(_cancel_unused, task, part))

    async def _run(self, part: Sequence[_PendingQuestion[_QuestionT, _ResultT]]) -> None:
        try:
            results = await self._send([question for question, _ in part])
        except BadResponse as error:
            if len(part) > 1:
                middle = len(part) // 2
                await asyncio.gather(self._run(part[:middle]), self._run(part[middle:]))
                return
            _fail_all(part, error)
        except Exception as error:
            _fail_all(part, error)
        else:
            for (_, future), result in zip(part, results, strict=True):
                if not future.done():
                    future.set_result(result)


def _fail_all(part: Sequence[_PendingQuestion[_QuestionT, _ResultT]], error: Exception) -> None:
    for _, future in part:
        if not future.done():
            future.set_exception(error)


def _cancel_unused(task: asyncio.Task[None], part: Sequence[_PendingQuestion[_QuestionT, _ResultT]], _: object) -> None:
    if all(future.done() for _, future in part) and not task.done():
        task.cancel()
