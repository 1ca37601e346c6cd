"""The trainer's side of one scoring process, which can be killed: real time limits for code that may never return."""

from __future__ import annotations

import multiprocessing as mp
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import util
from multiprocessing.connection import Connection
from typing import Any

from megatron_dppo.errors import RewardError
from megatron_dppo.rewards.functions import FunctionSpec
from megatron_dppo.rewards.item import RewardItem
from megatron_dppo.rewards.process_family import end_family
from megatron_dppo.rewards.scoring import Reply, ScoringOutcome, serve, too_slow

_START_SECONDS = 120.0
"""Limit for starting a process and importing the function."""
_EXIT_SECONDS = 5.0
"""Limit for a process that closed its connection to end by itself."""
_GRACE_SECONDS = 0.5
"""A coroutine is cancelled at its limit; the process is killed when it goes on for this long."""


@dataclass
class SampleChunk:
    """Samples that were given to a worker together, by their place in the caller's list."""

    number: int
    places: list[int]
    outcomes: dict[int, ScoringOutcome] = field(default_factory=dict)
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
        self._at_exit: Any = None
        self._chunk = SampleChunk(0, [])
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
        self._chunk = SampleChunk(self._chunk.number + 1, places)
        self.connection.send((self._chunk.number, [items[place] for place in places]))
        self.deadline = time.monotonic() + self._limit

    def receive(self) -> SampleChunk | None:
        """Take what is there; the chunk when it is done, or when the process had to be killed or died."""
        try:
            while self.connection.poll(0):
                if (reply := self._reply(self._chunk.number)) is None:
                    continue
                if reply.is_end:
                    self._chunk.error = reply.outcome.error
                    return self._chunk
                if reply.place is not None:
                    self._chunk.outcomes[self._chunk.places[reply.place]] = reply.outcome
                self.deadline = time.monotonic() + self._limit
        except Exception as error:  # the end of the connection, or what a function has written into it
            self._chunk.error = f"the scoring process died ({self._how_it_ended(error)})"
            self.close()
            return self._chunk
        if time.monotonic() < self.deadline:
            return None
        self._chunk.error = too_slow(self._timeout)
        self.close()
        return self._chunk

    def _reply(self, chunk: int) -> Reply | None:
        """The next reply; None when it is not this process's to this chunk."""
        reply = self.connection.recv()
        is_ours = isinstance(reply, Reply) and (reply.pid, reply.chunk) == (self._process.pid, chunk)
        return reply if is_ours else None

    def _how_it_ended(self, error: Exception) -> str:
        self._process.join(_EXIT_SECONDS)
        code = self._process.exitcode
        if code is None:
            return f"{type(error).__name__} on its connection"
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    def launch(self) -> None:
        """Start the process if there is none; several workers start side by side."""
        if self._process is not None and self._process.is_alive():
            return
        self.close()
        context = mp.get_context("spawn")
        self._connection, theirs = context.Pipe()
        # Not a daemon in multiprocessing's sense: those may not use multiprocessing themselves.
        self._process = context.Process(target=serve, args=(self._spec, self._timeout, theirs))
        self._process.start()
        theirs.close()
        # Where nobody calls close: multiprocessing would wait for the process at exit.
        self._at_exit = util.Finalize(None, end_family, args=(self._process,), exitpriority=10)
        self._started = False

    def _await_start(self) -> None:
        if self._started:
            return
        end = time.monotonic() + _START_SECONDS
        try:
            while not self._started:
                if not self.connection.poll(max(0.0, end - time.monotonic())):
                    problem = f"it did not start in {_START_SECONDS:g} s"
                    break
                if (reply := self._reply(0)) is not None:
                    problem, self._started = reply.outcome.error, True
        except (EOFError, OSError) as error:
            problem = f"it died at start ({self._how_it_ended(error)})"
        if problem:
            self.close()
            raise RewardError(
                f"{self._spec.table}.function = {self._spec.name!r} cannot be used in a worker process: {problem}. "
                "Mend the import, or install what it needs into this environment"
            )

    def close(self) -> None:
        """Kill the process, if there is one, and what it has started."""
        if self._process is not None:
            self._at_exit.cancel()
            end_family(self._process)
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None
        self._started = False
