"""Many runs of a user's function in lockstep: the turns that they ask for are decoded together, round by round."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dppo.rollout.response import GrowingResponse
from megatron_dppo.rollout.server import GenerateRequest, Generation
from megatron_dppo.rollout.turns import GenerateFunction, Turns, TurnsStopped, call_generate
from megatron_dppo.types import Completion, FinishReason, Prompt, SamplingParams

Decode = Callable[[Sequence[GenerateRequest]], Sequence[Generation]]
"""Answers to all requests, in order"""
_PATIENCE_SECONDS = 60.0
"""So long may nothing happen before those that ask go on without the others, which may be waiting for them, as where a
function holds one of few places of its own during all its turns."""


@dataclass(eq=False)
class PendingResponse:
    """One response on its way."""

    prompt: Prompt
    response: GrowingResponse
    completion: Completion | None = None
    """None = not complete"""


class Goal:
    """So many complete groups are enough."""

    def __init__(self, groups: Sequence[Sequence[PendingResponse]], enough: int) -> None:
        self._open = [sum(sample.completion is None for sample in group) for group in groups]
        self._group = {sample: i for i, group in enumerate(groups) for sample in group}
        self._enough = enough

    @property
    def is_reached(self) -> bool:
        """Whether the others are to stop."""
        return self._open.count(0) >= self._enough

    def ended(self, samples: Iterable[PendingResponse]) -> bool:
        """These have just become complete; whether that is enough."""
        for sample in samples:
            self._open[self._group[sample]] -= 1
        return self.is_reached


@dataclass(frozen=True)
class _Turn:
    request: GenerateRequest
    answer: asyncio.Future[Generation | None]
    """None = stop"""


class Rounds:
    """Runs a function once a response. Used once.

    A round begins when every run that has not ended asks for a turn, so that the same function gives the same rounds,
    whatever else it waits for and for how long.

    Args:
        function: a user's ``rollout.generate``.
        params: of whole responses.
        tokenizer: of the model.
        decode: samples the turns of a round.
        goal: when to stop, looked at between rounds; None = when all are complete.
    """

    def __init__(
        self, function: GenerateFunction, params: SamplingParams, tokenizer: Any, decode: Decode, goal: Goal | None
    ) -> None:
        self._function, self._params, self._tokenizer = function, params, tokenizer
        self._decode, self._goal = decode, goal
        self._asked: dict[int, _Turn] = {}
        self._changed = asyncio.Event()
        self._is_stopping = False

    async def run(self, samples: Sequence[PendingResponse]) -> None:
        """Complete the samples, or stop them where the goal is reached before; they have grown then.

        Raises:
            GenerateError: the function failed; the other runs of it have been cancelled.
        """
        tasks = [asyncio.create_task(self._complete(i, sample)) for i, sample in enumerate(samples)]
        for task in tasks:
            task.add_done_callback(lambda _: self._changed.set())
        try:
            while await self._someone_waits(tasks):
                self._is_stopping = self._is_stopping or (self._goal is not None and self._goal.is_reached)
                self._answer()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _complete(self, index: int, sample: PendingResponse) -> None:
        was_stopped = False

        async def more(limit: int, stop: tuple[int, ...]) -> FinishReason | None:
            nonlocal was_stopped
            sample.response = turns.response
            reason = await self._ask(index, sample, limit, stop)
            was_stopped = was_stopped or reason is None
            return reason

        turns = Turns(sample.prompt, sample.response, self._params, self._tokenizer, more)
        try:
            completion = await call_generate(self._function, turns)
        except TurnsStopped:
            return
        if not was_stopped:  # a function that catches everything may finish what is not complete
            sample.completion = completion
            if self._goal is not None:
                self._goal.ended([sample])

    async def _ask(self, index: int, sample: PendingResponse, limit: int, stop: tuple[int, ...]) -> FinishReason | None:
        if limit <= 0:
            return FinishReason.LENGTH
        if index in self._asked:
            raise RuntimeError("turns.sample was called while another turn of the same response was being sampled")
        request = sample.response.next_request(str(index), self._params, stop, limit)
        answer: asyncio.Future[Generation | None] = asyncio.get_running_loop().create_future()
        self._asked[index] = _Turn(request, answer)
        self._changed.set()
        try:
            generation = await answer
        finally:
            self._asked.pop(index, None)  # still there when the function gave it up
        if generation is None:
            return None
        sample.response.append_sampled(generation)
        return generation.finish_reason

    async def _someone_waits(self, tasks: Sequence[asyncio.Task[None]]) -> bool:
        """Returns when nobody does anything but wait for a turn: True, or False when all have ended."""
        while True:
            for task in tasks:
                if task.done():
                    task.result()
            living = [i for i, task in enumerate(tasks) if not task.done()]
            if all(i in self._asked for i in living):
                return bool(living)
            self._changed.clear()
            try:
                async with asyncio.timeout(_PATIENCE_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                if self._asked:
                    return True

    def _answer(self) -> None:
        """One round: by the order of the responses, so that it does not matter who asked first."""
        turns = [turn for _, turn in sorted(self._asked.items()) if not turn.answer.done()]
        self._asked.clear()
        requests = [turn.request for turn in turns]
        answers = [None] * len(turns) if self._is_stopping else self._decode(requests)
        for turn, answer in zip(turns, answers, strict=True):
            turn.answer.set_result(answer)
