"""Simulated responses and inference servers of ``stream.py``, on the virtual clock."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from megatron_dppo.rewards.item import RewardItem, RewardResult
from megatron_dppo.types import FinishReason, Prompt, VersionSpan
from megatron_dppo_engines.server import GenerateRequest, Generation
from tests.faults.simulation import seams

UNIT = 64
"""Tokens that one token of the simulation stands for."""
LONGEST = 16384
SIBLINGS = 16
SLOTS = 256
END, FIRST = 2, 3
"""The end token; the token that stands for all others of a prompt's first response."""


class Population:
    """Prompts, how long each response to them gets, and its reward.

    Args:
        mean: log-normal parameter of the lengths, as ``sigma``.
        sigma: of the logarithm; half of its variance is between prompts.
        flat: share of prompts whose responses have equal rewards.
    """

    longest = 1

    def __init__(self, mean: float, sigma: float, flat: float) -> None:
        self._mean = mean
        self._deviation = sigma * 0.5**0.5
        self._flat = flat
        self.unsent: dict[int, list[int]] = defaultdict(lambda: list(range(SIBLINGS)))
        """Siblings of each prompt that no server has begun."""
        self.begun: dict[tuple[int, int], float] = {}
        """Tokens of the incomplete unit of stopped responses."""
        self.lengths = cache(self._lengths)

    def __getitem__(self, position: int) -> Prompt:
        """Return the prompt at a position."""
        return Prompt(prompt_id=str(position), text="", token_ids=(position,), label=str(position))

    def _lengths(self, position: int) -> list[int]:
        """Return the length of each sibling, in units."""
        draw = random.Random(f"lengths/{position}")
        centre = self._mean + draw.gauss(0, self._deviation)
        return [
            max(2, round(min(LONGEST, draw.lognormvariate(centre, self._deviation)) / UNIT)) for _ in range(SIBLINGS)
        ]

    def mean_length(self, positions: Sequence[int]) -> float:
        """Return the mean length of all responses to the prompts, in tokens."""
        return UNIT * statistics.fmean(length for position in positions for length in self.lengths(position))

    def score(self, items: Sequence[RewardItem], *, is_batch: bool) -> list[RewardResult]:
        """Return a random binary reward for each response."""
        return [RewardResult(reward=self._reward(int(i.label), i.token_ids[0])) for i in items]

    def _reward(self, position: int, sibling: int) -> float:
        draw = random.Random(f"reward/{position}")
        return 0.0 if draw.random() < self._flat else float((draw.getrandbits(SIBLINGS) >> (sibling - FIRST)) & 1)


@dataclass(eq=False)
class Job:
    """One request on a server."""

    request: GenerateRequest
    position: int
    sibling: int
    answer: asyncio.Future[Generation]
    given: int
    """Units sampled before this request."""
    before: float
    """Tokens of the incomplete unit sampled before this request."""
    begun: float = 0.0
    """Token count of the server at the start of the request."""


class Server:
    """An inference server with slots; all that runs goes on by one token a decode step.

    Args:
        number: its place.
        population: of responses.
        reread: tokens a second.
    """

    def __init__(self, number: int, population: Population, reread: float) -> None:
        self.url, self.version = f"http://s{number}", -1
        self._population = population
        self._reread = reread
        self._loop = seams.NOW.loop
        self._waiting: dict[str, Job] = {}
        self._running: dict[str, Job] = {}
        self._ends: list[tuple[float, int, Job]] = []
        self._numbers = itertools.count()
        self._tokens = self._now = self._reading_until = 0.0
        self.slot_seconds = self.reading_seconds = 0.0
        self._timer: asyncio.Handle | None = None
        self._timer_is_now = False

    async def alive(self) -> bool:
        """Return True."""
        return True

    health = alive

    async def close(self) -> None:
        """Do nothing."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Wait for a slot and decode until the end of the response."""
        position, given = request.token_ids[0], len(request.token_ids) - 1
        sibling = request.token_ids[1] - FIRST if given else self._population.unsent[position].pop(0)
        before = self._population.begun.pop((position, sibling), 0.0)
        job = Job(request, position, sibling, self._loop.create_future(), given, before)
        self._waiting[request.request_id] = job
        self._act_soon(0.0)
        try:
            return await job.answer
        finally:
            if job.answer.cancelled():
                self._advance()
                self._leave(job)

    async def abort(self, request_id: str) -> None:
        """Abort a request and return its tokens so far."""
        self._advance()
        job = self._waiting.get(request_id) or self._running.get(request_id)
        if job is not None:
            done = job.before + (self._tokens - job.begun if request_id in self._running else 0.0)
            job.answer.set_result(self._leave(job, min(int(done / UNIT), self._left(job) - 1), done))

    def _left(self, job: Job) -> int:
        return self._population.lengths(job.position)[job.sibling] - job.given

    def _leave(self, job: Job, units: int = 0, done: float = 0.0) -> Generation:
        self._waiting.pop(job.request.request_id, None)
        self._running.pop(job.request.request_id, None)
        self._act_soon(0.0)
        if units < self._left(job):
            if not job.given + units:
                self._population.unsent[job.position].insert(0, job.sibling)
            else:
                self._population.begun[job.position, job.sibling] = done - units * UNIT
            reason = FinishReason.ABORT
        else:
            is_longest = job.given + units == LONGEST // UNIT
            reason = FinishReason.LENGTH if is_longest else FinishReason.STOP
        tokens = torch.full((units,), FIRST + job.sibling, dtype=torch.int32)
        if reason == FinishReason.STOP:
            tokens[-1] = END
        versions = (VersionSpan(self.version, 0, units),) if units else ()
        return Generation(
            token_ids=tokens, logprobs=torch.full((units,), -0.5), finish_reason=reason, versions=versions
        )

    def _advance(self) -> None:
        now = self._loop.time()
        decoding = now - min(now, max(self._now, self._reading_until))
        self.reading_seconds += now - self._now - decoding
        self.slot_seconds += len(self._running) * (now - self._now)
        self._tokens += decoding / self._step()
        self._now = now

    def _step(self) -> float:
        return 0.012 + 0.00006 * len(self._running)

    def _act_soon(self, delay: float) -> None:
        """Schedule one turn for all current events; the next one when the next response is complete."""
        if self._timer is not None:
            if self._timer_is_now:
                return
            self._timer.cancel()
        self._timer_is_now = not delay
        self._timer = self._loop.call_later(delay, self._act) if delay else self._loop.call_soon(self._act)

    def _act(self) -> None:
        self._timer = None
        self._advance()
        while self._ends and (self._ends[0][2].answer.done() or self._ends[0][0] <= self._tokens + 1e-3):
            job = heapq.heappop(self._ends)[2]
            if not job.answer.done():
                job.answer.set_result(self._leave(job, self._left(job)))
        for job in list(itertools.islice(self._waiting.values(), max(0, SLOTS - len(self._running)))):
            del self._waiting[job.request.request_id]
            self._running[job.request.request_id] = job
            job.begun = self._tokens
            read = (job.given * UNIT + job.before) / self._reread
            self._reading_until = max(self._now, self._reading_until) + read
            end = job.begun + self._left(job) * UNIT - job.before
            heapq.heappush(self._ends, (end, next(self._numbers), job))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ends:
            left = max(0.0, self._reading_until - self._now) + (self._ends[0][0] - self._tokens) * self._step()
            self._act_soon(max(1e-6, left))
