"""Requests to scoring servers, one at a time or in batches: retries, and errors without the key."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import aiohttp

from megatron_dppo.config.reward_options import ServerOptions
from megatron_dppo.errors import RewardError

_BUSY = (429, 502, 503, 504)


_FIRST_PAUSE_SECONDS = 0.1


_LONGEST_PAUSE_SECONDS = 2.0


_LARGEST_ANSWER = 1 << 26


class Unreachable(Exception):
    """No server took the request, also at the last attempt."""


class BadAnswer(Exception):
    """A server refused the request, or its answer is not what was asked for."""


class ScoringServers:
    """One server or several that take turns; made in any process, used in one event loop.

    Raises:
        RewardError: the key is not in the environment.
    """

    def __init__(self, options: ServerOptions, table: str) -> None:
        self._urls = itertools.cycle(options.urls)
        self._count, self._rounds = len(options.urls), 1 + options.retries
        self._session: aiohttp.ClientSession | None = None
        self._key = os.environ.get(options.api_key_env, "") if options.api_key_env else ""
        if options.api_key_env and not self._key:
            raise RewardError(
                f"{table}.options.api_key_env = {options.api_key_env!r}: there is no such environment variable, or it "
                "is empty"
            )

    async def post(self, path: str, body: Any) -> Any:
        """The JSON that a server answers.

        Raises:
            Unreachable: none could be reached, or all were busy, at every attempt.
            BadAnswer: a server answered with an error, or with something else than JSON.
        """
        if self._session is None:
            # The limit is that of a sample, which whoever waits for this has.
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            self._session = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None))
        problem = ""
        attempts = self._rounds * self._count
        for attempt in range(attempts):
            if attempt and attempt % self._count == 0:  # all of them were asked
                await asyncio.sleep(min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2 ** (attempt // self._count)))
            url = next(self._urls) + path
            try:
                async with self._session.post(url, json=body, allow_redirects=False) as response:
                    if response.status in _BUSY:
                        problem = f"{url} answered {response.status}"
                        continue
                    return self._read(url, response.status, await _content(response))
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError) as error:
                problem = f"{url} cannot be reached ({type(error).__name__})"
        raise Unreachable(f"{problem}, at the last of {attempts} attempts")

    def _read(self, url: str, status: int, content: bytes) -> Any:
        if status != 200:
            said = content[:300].decode("utf-8", "replace")
            said = said.replace(self._key, "***") if self._key else said
            raise BadAnswer(f"{url} answered {status}: {said}")
        try:
            return json.loads(content)
        except ValueError as error:
            raise BadAnswer(f"{url} did not answer with JSON") from error


async def _content(response: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for part in response.content.iter_any():
        content += part
        if len(content) > _LARGEST_ANSWER:
            raise BadAnswer(f"{response.url} answered with more than {_LARGEST_ANSWER >> 20} MiB")
    return bytes(content)


_Waiting = tuple[Any, "asyncio.Future[Any]"]


class Batches:
    """Collects what is asked in one turn of the event loop and sends it in requests of at most ``size``.

    A request that is answered badly is split in two and each half sent again, until the question at fault stands alone.
    It is cancelled when nobody waits for any of its answers.

    Args:
        send: asks several questions at once; one answer each, or BadAnswer.
        size: questions in one request.
    """

    def __init__(self, send: Callable[[Sequence[Any]], Awaitable[Sequence[Any]]], size: int) -> None:
        self._send, self._size = send, size
        self._waiting: list[_Waiting] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, question: Any) -> Any:
        """The answer.

        Raises:
            Exception: what ``send`` raised for it.
        """
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._start)  # after all others that ask in this turn
        future = loop.create_future()
        self._waiting.append((question, future))
        return await future

    def _start(self) -> None:
        waiting, self._waiting = self._waiting, []
        for first in range(0, len(waiting), self._size):
            part = waiting[first : first + self._size]
            task = asyncio.create_task(self._run(part))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            for _, future in part:
                future.add_done_callback(partial(_cancel_unused, task, part))

    async def _run(self, part: Sequence[_Waiting]) -> None:
        try:
            answers = await self._send([question for question, _ in part])
        except BadAnswer as error:
            if len(part) > 1:
                middle = len(part) // 2
                await asyncio.gather(self._run(part[:middle]), self._run(part[middle:]))
                return
            _settle(part, error)
        except Exception as error:
            _settle(part, error)
        else:
            for (_, future), answer in zip(part, answers, strict=True):
                if not future.done():
                    future.set_result(answer)


def _settle(part: Sequence[_Waiting], error: Exception) -> None:
    for _, future in part:
        if not future.done():
            future.set_exception(error)


def _cancel_unused(task: asyncio.Task[None], part: Sequence[_Waiting], _: object) -> None:
    if all(future.done() for _, future in part) and not task.done():
        task.cancel()
