"""The scoring process: it calls the user's function, which may do anything, and sends back what it returned."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

from megatron_dppo.rewards.functions import FunctionSpec, RewardFunction, load
from megatron_dppo.rewards.item import RewardItem, error_text, read_batch, read_reward
from megatron_dppo.rewards.math import load_parser
from megatron_dppo.rewards.signatures import call

_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class ScoringOutcome(NamedTuple):
    """What became of one sample."""

    score: float
    parts: Mapping[str, float] = MappingProxyType({})
    error: str = ""


class Reply(NamedTuple):
    """What the process sends; ``pid`` and ``chunk`` say whose it is."""

    pid: int
    chunk: int
    """the number of the chunk; 0 = the start of the process"""
    place: int | None
    """of a sample in the chunk; None = the chunk's end, or a sign of life"""
    outcome: ScoringOutcome
    is_end: bool = False


class Channel:
    """The connection to the trainer, of this process alone.

    A reward function may fork. Its copy returns from the function too, and must then neither answer for a sample nor
    take the next one: the connection is closed in it, and it ends where it would send or receive.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection, self._pid, self._chunk = connection, os.getpid(), 0
        os.register_at_fork(after_in_child=self._connection.close)

    def _check(self) -> None:
        if os.getpid() != self._pid:
            os._exit(0)

    def receive(self) -> Sequence[RewardItem]:
        """The samples of the next chunk; EOFError when there is no trainer any more."""
        self._check()
        self._chunk, items = self._connection.recv()
        return items

    def send(self, place: int | None, outcome: ScoringOutcome, *, is_end: bool = False) -> None:
        """Send one sample's outcome, or the end of the chunk."""
        self._check()
        try:
            self._connection.send(Reply(self._pid, self._chunk, place, outcome, is_end))
        except OSError:  # the trainer has ended, or the function has closed what is not its own
            os._exit(1)


class Interruptions:
    """Signals that ask the trainer to stop. It lets this process finish its sample, and ends it itself."""

    def __init__(self) -> None:
        self._count = 0
        for number in _STOPS:
            signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)  # the trainer blocks them in what it starts
        # A function may end its own child by SIGTERM, and at once: the signal waits until the child has no handler.
        os.register_at_fork(before=self._block, after_in_parent=self._unblock, after_in_child=self._default)
        self._masks = threading.local()

    def _block(self) -> None:
        self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)

    def _unblock(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.before)

    def _default(self) -> None:
        for number in _STOPS:
            signal.signal(number, signal.SIG_DFL)
        self._unblock()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._count += 1

    def undisturbed(self, score: Callable[[], Any], channel: Channel) -> Any:
        """What ``score`` gives, again if a signal arrived: that may have ended a program which it had started."""
        before, value = self._count, score()
        if self._count == before:
            return value
        channel.send(None, ScoringOutcome(0.0, {}))  # its time limit begins again
        return score()


def serve(spec: FunctionSpec, timeout: float, connection: Connection) -> None:
    """The program of the process, until the trainer closes the connection.

    Args:
        spec: the function.
        timeout: seconds for one sample of an async function; the trainer watches over the others.
        connection: gets chunks, and is answered with ``Reply``.
    """
    os.setsid()  # signals to the trainer's group stay away, and the trainer can end all that is started here
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)  # for what reads from a terminal
    os.close(empty)
    score_chunks(spec, timeout, Channel(connection), Interruptions())
    os._exit(0)  # threads and processes that a function has left must not keep this one


def score_chunks(spec: FunctionSpec, timeout: float, channel: Channel, interruptions: Interruptions) -> None:
    """Load the function, say so, score."""
    try:
        function = load(spec)
        if spec.name == "math":
            load_parser()
    except Exception as error:
        channel.send(None, ScoringOutcome(0.0, {}, error_text(error)), is_end=True)
        return
    channel.send(None, ScoringOutcome(0.0, {}), is_end=True)
    # One event loop for all chunks, so that a function may keep a client session.
    with asyncio.Runner() as runner:
        while True:
            try:
                items = channel.receive()
            except (EOFError, OSError):
                return
            end = _score_chunk(function, spec, items, timeout, runner, channel, interruptions)
            channel.send(None, ScoringOutcome(0.0, {}, end), is_end=True)


def _score_chunk(
    function: RewardFunction,
    spec: FunctionSpec,
    items: Sequence[RewardItem],
    timeout: float,
    runner: asyncio.Runner,
    channel: Channel,
    interruptions: Interruptions,
) -> str:
    """Send the outcomes; returns why the samples without one have none."""
    if function.form.batched:
        try:
            outcomes = interruptions.undisturbed(partial(_score_batch, function, spec, items, runner), channel)
        except BaseException as error:
            return error_text(error)
        for index, outcome in enumerate(outcomes):
            channel.send(index, outcome)
    elif function.is_async:
        runner.run(_score_together(function, spec, items, timeout, channel))
    else:
        for index, item in enumerate(items):
            outcome = interruptions.undisturbed(partial(_score_one, function, spec, item, runner), channel)
            channel.send(index, outcome)
    return ""


def _outcome(value: Any) -> ScoringOutcome:
    try:
        return ScoringOutcome(*read_reward(value))
    except BaseException as error:
        return ScoringOutcome(0.0, {}, error_text(error))


def _score_one(
    function: RewardFunction, spec: FunctionSpec, item: RewardItem, runner: asyncio.Runner
) -> ScoringOutcome:
    try:
        value = call(function.form, function.function, [item], spec.facts, function.options)
        # A wrapper may hide that its function is async.
        return _outcome(runner.run(_awaited(value)) if inspect.isawaitable(value) else value)
    except BaseException as error:  # also SystemExit
        return ScoringOutcome(0.0, {}, error_text(error))


def _score_batch(
    function: RewardFunction, spec: FunctionSpec, items: Sequence[RewardItem], runner: asyncio.Runner
) -> list[ScoringOutcome]:
    values = call(function.form, function.function, items, spec.facts, function.options)
    if inspect.isawaitable(values):
        values = runner.run(_awaited(values))
    return [_outcome(value) for value in read_batch(values, len(items))]


async def _awaited(value: Any) -> Any:
    return await value


async def _score_together(
    function: RewardFunction, spec: FunctionSpec, items: Sequence[RewardItem], timeout: float, channel: Channel
) -> None:
    """All samples at once, each with its own limit; each outcome is sent as soon as it is there."""

    async def score(index: int, item: RewardItem) -> None:
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                outcome = _outcome(await call(function.form, function.function, [item], spec.facts, function.options))
        except BaseException as error:
            outcome = ScoringOutcome(0.0, {}, too_slow(timeout) if limit.expired() else error_text(error))
        channel.send(index, outcome)

    await asyncio.gather(*(score(index, item) for index, item in enumerate(items)))


def too_slow(timeout: float) -> str:
    """The error of a sample over its limit."""
    return f"took longer than reward.timeout_seconds = {timeout:g} and was stopped"
