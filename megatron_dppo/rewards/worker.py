"""One process that scores samples and can be killed: real time limits for code that may never return."""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing as mp
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron_dppo.errors import RewardError
from megatron_dppo.rewards.functions import FunctionSpec, RewardFunction, load
from megatron_dppo.rewards.item import RewardItem
from megatron_dppo.rewards.math import load_parser
from megatron_dppo.rewards.signatures import call
from megatron_dppo.rewards.values import read_batch, read_reward

_START_SECONDS = 120.0
"""Limit for starting a process and importing the function."""
_EXIT_SECONDS = 5.0
"""Limit for a process that closed its connection to end by itself."""
_GRACE_SECONDS = 0.5
"""A coroutine is cancelled at its limit; the process is killed when it goes on for this long."""


class Outcome(NamedTuple):
    """What became of one sample."""

    score: float
    parts: Mapping[str, float] = MappingProxyType({})
    error: str = ""


class _Report(NamedTuple):
    """From the worker: the outcome of one sample of a chunk, or (place None) the end of the chunk."""

    place: int | None
    outcome: Outcome


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _outcome(value: Any) -> Outcome:
    try:
        return Outcome(*read_reward(value))
    except Exception as error:
        return Outcome(0.0, {}, _text(error))


def _serve(spec: FunctionSpec, timeout: float, connection: Connection) -> None:
    try:
        function = load(spec)
        if spec.name == "math":
            load_parser()
    except Exception as error:
        connection.send(_text(error))
        return
    connection.send("")
    # One event loop for all chunks, so that a function may keep a client session.
    with asyncio.Runner() as runner:
        while True:
            try:
                items = connection.recv()
            except EOFError:
                return
            end = ""
            if function.form.batched:
                try:
                    outcomes = _score_batch(function, spec, items, runner)
                except Exception as error:
                    outcomes, end = [], _text(error)
                for index, outcome in enumerate(outcomes):
                    connection.send(_Report(index, outcome))
            elif function.is_async:
                runner.run(_score_together(function, spec, items, timeout, connection))
            else:
                for index, item in enumerate(items):
                    connection.send(_Report(index, _score_one(function, spec, item, runner)))
            connection.send(_Report(None, Outcome(0.0, {}, end)))


def _score_one(function: RewardFunction, spec: FunctionSpec, item: RewardItem, runner: asyncio.Runner) -> Outcome:
    try:
        value = call(function.form, function.function, [item], spec.facts)
        # A wrapper may hide that its function is async.
        return _outcome(runner.run(_awaited(value)) if inspect.isawaitable(value) else value)
    except Exception as error:
        return Outcome(0.0, {}, _text(error))


def _score_batch(
    function: RewardFunction, spec: FunctionSpec, items: Sequence[RewardItem], runner: asyncio.Runner
) -> list[Outcome]:
    values = call(function.form, function.function, items, spec.facts)
    if inspect.isawaitable(values):
        values = runner.run(_awaited(values))
    return [_outcome(value) for value in read_batch(values, len(items))]


async def _awaited(value: Any) -> Any:
    return await value


async def _score_together(
    function: RewardFunction, spec: FunctionSpec, items: Sequence[RewardItem], timeout: float, connection: Connection
) -> None:
    """All samples at once, each with its own limit; each outcome is sent as soon as it is there."""

    async def score(index: int, item: RewardItem) -> None:
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                outcome = _outcome(await call(function.form, function.function, [item], spec.facts))
        except (Exception, asyncio.CancelledError) as error:
            outcome = Outcome(0.0, {}, _too_slow(timeout) if limit.expired() else _text(error))
        connection.send(_Report(index, outcome))

    await asyncio.gather(*(score(index, item) for index, item in enumerate(items)))


def _too_slow(timeout: float) -> str:
    return f"took longer than reward.timeout_seconds = {timeout:g} and was stopped"


@dataclass
class Chunk:
    """Samples that were given to a worker together, by their place in the caller's list."""

    places: list[int]
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    """by place"""
    error: str = ""
    """why the samples without an outcome have none"""

    @property
    def unscored(self) -> list[int]:
        """The places without an outcome."""
        return [place for place in self.places if place not in self.outcomes]


class Worker:
    """A scoring process, started at the first sample and restarted after a kill.

    Args:
        spec: the function.
        timeout_seconds: limit for one sample, or for one call of a function for batches.
        concurrent: whether the function scores the samples of a chunk at the same time (it is async).
    """

    def __init__(self, spec: FunctionSpec, timeout_seconds: float, *, concurrent: bool) -> None:
        self._spec, self._timeout = spec, timeout_seconds
        self._limit = timeout_seconds + (_GRACE_SECONDS if concurrent else 0.0)
        self._process: Any = None
        self._connection: Connection | None = None
        self._chunk = Chunk([])
        self._started = False
        self.deadline = 0.0
        """``time.monotonic()`` after which the process is killed"""

    @property
    def connection(self) -> Connection:
        """Readable when there is something for ``receive``."""
        assert self._connection is not None
        return self._connection

    def submit(self, places: list[int], items: Sequence[RewardItem]) -> None:
        """Start scoring a chunk; ``receive`` must follow until it gives the chunk back."""
        self.launch()
        self._await_start()
        self._chunk = Chunk(places)
        self.connection.send([items[place] for place in places])
        self.deadline = time.monotonic() + self._limit

    def receive(self) -> Chunk | None:
        """Take what is there; the chunk when it is done, or when the process had to be killed or died."""
        try:
            while self.connection.poll(0):
                report = self.connection.recv()
                if report.place is None:
                    self._chunk.error = report.outcome.error
                    return self._chunk
                self._chunk.outcomes[self._chunk.places[report.place]] = report.outcome
                self.deadline = time.monotonic() + self._limit
        except (EOFError, OSError):
            self._process.join(_EXIT_SECONDS)
            self._chunk.error = f"the scoring process died (exit code {self._process.exitcode})"
            self.close()
            return self._chunk
        if time.monotonic() < self.deadline:
            return None
        self._chunk.error = _too_slow(self._timeout)
        self.close()
        return self._chunk

    def launch(self) -> None:
        """Start the process if there is none; several workers start side by side."""
        if self._process is not None and self._process.is_alive():
            return
        self.close()
        context = mp.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._spec, self._timeout, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._started = False

    def _await_start(self) -> None:
        if self._started:
            return
        if not self.connection.poll(_START_SECONDS):
            self.close()
            raise RewardError(
                f"reward.function = {self._spec.name!r}: its process did not start in {_START_SECONDS:g} s"
            )
        try:
            problem = self.connection.recv()
        except (EOFError, OSError):
            self._process.join(_EXIT_SECONDS)
            problem = f"its process died at start (exit code {self._process.exitcode})"
        if problem:
            self.close()
            raise RewardError(
                f"reward.function = {self._spec.name!r} cannot be used in a worker process: {problem}. Mend the "
                "import, or install what it needs into this environment"
            )
        self._started = True

    def close(self) -> None:
        """Kill the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None
        self._started = False
