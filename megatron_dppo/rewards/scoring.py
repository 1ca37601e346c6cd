"""The worker process: it calls the user's function, which may do anything, and sends back the results."""

import asyncio
import inspect
import io
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple, TypeVar

from megatron_dppo.rewards.functions import FunctionSpec, RewardFunction, load
from megatron_dppo.rewards.item import RewardItem, error_text, read_batch, read_reward
from megatron_dppo.rewards.signatures import RunInfo, call
from megatron_dppo_answers.math import load_parser

_T = TypeVar("_T")
_CALL_ERROR = re.compile(r"\(\) (got an unexpected keyword argument|got multiple values|missing \d+ required|takes )")
"""Messages of Python's TypeError for arguments that do not fit a function."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class ScoringOutcome(NamedTuple):
    """Score and parts of one sample, or an error."""

    score: float
    parts: Mapping[str, float] = MappingProxyType({})
    error: str = ""
    is_wrong_type: bool = False
    """True if the error does not depend on the answer: the value is no reward, or the call does not fit."""


class Reply(NamedTuple):
    """A message of the process. ``pid`` and ``chunk`` identify its sender."""

    pid: int
    chunk: int
    """Number of the chunk; 0 for the start of the process."""
    sample_index: int | None
    """Index of a sample in the chunk. None for the end of the chunk, or for a sign of life."""
    outcome: ScoringOutcome
    is_end: bool = False


class TrainerConnection:
    """The connection to the trainer, used only by the process that created it.

    A reward function may fork. Its copy also returns from the function, but must neither send a result nor receive
    samples. The connection is therefore closed in a copy, and a copy exits where it would send or receive.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._pid = os.getpid()
        self._chunk = 0
        os.register_at_fork(after_in_child=self._connection.close)

    def _check(self) -> None:
        if os.getpid() != self._pid:
            os._exit(0)

    def receive(self) -> Sequence[RewardItem]:
        """Return the samples of the next chunk, and report that their time limit begins.

        Unpickling imports what the samples refer to, torch for example. That is not the function's time. An EOFError if
        the trainer has exited.
        """
        self._check()
        self._chunk, items = self._connection.recv()
        self.send(None, ScoringOutcome(0.0, {}))
        return items

    def send(self, index: int | None, outcome: ScoringOutcome, *, is_end: bool = False) -> None:
        """Send one sample's outcome, or the end of the chunk."""
        self._check()
        try:
            self._connection.send(Reply(self._pid, self._chunk, index, outcome, is_end))
        except OSError:  # The trainer has exited, or the function closed a descriptor that it does not own.
            os._exit(1)


class StopSignals:
    """Counts stop signals, so that the process finishes its sample: the trainer ends it afterwards."""

    def __init__(self) -> None:
        self._count = 0
        for number in _STOP_SIGNALS:
            signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)  # The trainer blocks them in its children.
        # A function may send SIGTERM to its child right after the fork. Block it until the child's handler is reset.
        os.register_at_fork(before=self._block, after_in_parent=self._unblock, after_in_child=self._default)
        self._masks = threading.local()

    def _block(self) -> None:
        self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)

    def _unblock(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.before)

    def _default(self) -> None:
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        self._unblock()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._count += 1

    def retry_if_interrupted(self, score: Callable[[], _T], connection: TrainerConnection) -> _T:
        """Return the result of ``score``; call it again if a signal may have ended a program that it had started."""
        before = self._count
        value = score()
        if self._count == before:
            return value
        connection.send(None, ScoringOutcome(0.0, {}))  # A sign of life restarts the time limit.
        return score()


def run_worker(
    spec: FunctionSpec, timeout: float, connection: Connection, writers: tuple[Connection, Connection]
) -> None:
    """Run the process until the trainer closes the connection.

    ``timeout`` is for one sample of an async function; the trainer enforces that of other functions. ``writers``
    become stdout and stderr, of which the trainer passes on a limited part.
    """
    # A process that was spawned would spawn its children, too. A function expects the default of its Python.
    multiprocessing.set_start_method(None, force=True)
    # A session of its own: signals to the trainer's group do not arrive, and the trainer can kill the session.
    os.setsid()
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)  # A function must not read from the trainer's terminal.
    os.close(empty)
    for stream, writer in zip((1, 2), writers, strict=True):
        os.dup2(writer.fileno(), stream)
        writer.close()
    for text in (sys.stdout, sys.stderr):
        if isinstance(text, io.TextIOWrapper):
            text.reconfigure(line_buffering=True)  # The process may be killed after any line.
    score_chunks(spec, timeout, TrainerConnection(connection), StopSignals())
    os._exit(0)  # Do not wait for threads and processes that a function has left.


def score_chunks(spec: FunctionSpec, timeout: float, connection: TrainerConnection, stop_signals: StopSignals) -> None:
    """Load the function, report the result, then score chunks until the connection closes."""
    try:
        function = load(spec)
        if spec.name == "math":
            load_parser()
    except Exception as error:
        connection.send(None, ScoringOutcome(0.0, {}, error_text(error)), is_end=True)
        return
    connection.send(None, ScoringOutcome(0.0, {}), is_end=True)
    # One event loop for all chunks, so that a function can keep a client session.
    with asyncio.Runner() as runner:
        scorer = _ChunkScorer(function, spec.run_info, timeout, runner, connection, stop_signals)
        while True:
            try:
                items = connection.receive()
            except (EOFError, OSError):
                return
            connection.send(None, ScoringOutcome(0.0, {}, scorer.score(items)), is_end=True)


@dataclass(frozen=True)
class _ChunkScorer:
    """Scorer of chunks with the function of the process."""

    function: RewardFunction
    run_info: RunInfo
    timeout: float
    runner: asyncio.Runner
    connection: TrainerConnection
    stop_signals: StopSignals

    def score(self, items: Sequence[RewardItem]) -> str:
        """Send the outcomes, and return the error of the samples without one."""
        retry = self.stop_signals.retry_if_interrupted
        if self.function.convention.is_batched:
            try:
                outcomes = retry(partial(self._score_batch, items), self.connection)
            except BaseException as error:
                if len(items) > 1:
                    return error_text(error, self.function.function)
                outcomes = [self._failure(error)]
            for index, outcome in enumerate(outcomes):
                self.connection.send(index, outcome)
        elif self.function.is_async:
            self.runner.run(self._score_together(items))
        else:
            for index, item in enumerate(items):
                self.connection.send(index, retry(partial(self._score_one, item), self.connection))
        return ""

    def _call(self, items: Sequence[RewardItem]) -> Any:
        function = self.function
        return call(function.convention, function.function, items, self.run_info, function.options)

    def _outcome(self, value: object) -> ScoringOutcome:
        try:
            return ScoringOutcome(*read_reward(value))
        except TypeError as error:
            return self._wrong_type(error)
        except BaseException as error:
            return ScoringOutcome(0.0, {}, error_text(error, self.function.function))

    def _wrong_type(self, error: TypeError) -> ScoringOutcome:
        """Return the outcome of a value that is no reward. No line has raised, so the function itself is named."""
        return ScoringOutcome(0.0, {}, error_text(error, self.function.function), is_wrong_type=True)

    def _failure(self, error: BaseException) -> ScoringOutcome:
        """Return the outcome of a function that raised, or that cannot be called with its convention's arguments."""
        if isinstance(error, TypeError) and _CALL_ERROR.search(str(error)):
            return self._wrong_type(error)
        return ScoringOutcome(0.0, {}, error_text(error, self.function.function))

    def _score_one(self, item: RewardItem) -> ScoringOutcome:
        try:
            value = self._call([item])
            # A wrapper may hide that its function is async, so check the value too.
            return self._outcome(self.runner.run(_awaited(value)) if inspect.isawaitable(value) else value)
        except BaseException as error:  # Also SystemExit.
            return self._failure(error)

    def _score_batch(self, items: Sequence[RewardItem]) -> list[ScoringOutcome]:
        values = self._call(items)
        if inspect.isawaitable(values):
            values = self.runner.run(_awaited(values))
        try:
            rewards = read_batch(values, len(items))
        except TypeError as error:
            if len(items) > 1:
                raise
            return [self._wrong_type(error)]
        return [self._outcome(value) for value in rewards]

    async def _score_together(self, items: Sequence[RewardItem]) -> None:
        """Score all samples concurrently, each with its own time limit, and send each outcome at once."""

        async def score(index: int, item: RewardItem) -> None:
            limit = asyncio.timeout(self.timeout)
            try:
                async with limit:
                    outcome = self._outcome(await self._call([item]))
            except BaseException as error:
                too_late = ScoringOutcome(0.0, {}, too_slow(self.timeout))
                outcome = too_late if limit.expired() else self._failure(error)
            self.connection.send(index, outcome)

        await asyncio.gather(*(score(index, item) for index, item in enumerate(items)))


async def _awaited(value: Awaitable[object]) -> object:
    return await value


def too_slow(timeout: float) -> str:
    """Return the error text of a sample over its time limit."""
    return f"took longer than reward.timeout_seconds = {timeout:g} and was stopped"
