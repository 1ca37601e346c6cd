"""Questions that are asked at the same time go to the server together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from megatron_dppo.rewards.http import BadAnswer

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
