"""The trainer's side of one worker process, which it can kill: real time limits for code that may never return."""

import multiprocessing as mp
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import util
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from megatron_dppo.errors import RewardError
from megatron_dppo.rewards.functions import FunctionSpec
from megatron_dppo.rewards.item import RewardItem
from megatron_dppo.rewards.scoring import Reply, ScoringOutcome, run_worker, too_slow
from megatron_dppo.rewards.worker_output import WorkerOutput
from megatron_dppo_answers.process_tree import kill_process_tree

_START_SECONDS = 120.0
"""Time limit in seconds for the start of the process with the import of the function, and for unpickling a chunk."""
_EXIT_SECONDS = 5.0
"""Time limit in seconds for a process that closed its connection to exit by itself."""
_GRACE_SECONDS = 0.5
"""A coroutine is canceled at its limit. The process is killed if it continues for this many seconds."""
_CHECK_SECONDS = 0.1
"""Time between two checks of a process that waits for a CPU at its limit."""


class TimeLimit:
    """Limit on the wall time of a process's main thread from now on, less the time in which it waited for a CPU."""

    def __init__(self, pid: int, seconds: float) -> None:
        self._pid = pid
        self._begin = time.monotonic()
        self._seconds = seconds
        self._first = self._last = read_cpu_use(pid)
        self._last_check = self._begin
        self.deadline = self._begin + seconds
        """Time (``time.monotonic()``) at which to call ``extend``."""

    def extend(self) -> bool:
        """Move the deadline if the process waited for a CPU; return False if its time is over.

        Linux counts a wait only when it is over. So a process that is runnable, and has hardly run since the last
        check, is taken to be waiting now.
        """
        now = time.monotonic()
        use = read_cpu_use(self._pid)
        deadline = self._begin + self._seconds + use.waited - self._first.waited
        # Hardly running: less than half of the time since the last check.
        is_waiting = use.is_runnable and use.ran - self._last.ran < (now - self._last_check) / 2
        self._last = use
        self._last_check = now
        self.deadline = deadline if deadline > now else now + _CHECK_SECONDS
        return deadline > now or is_waiting


class CpuUse(NamedTuple):
    """CPU use of a process's main thread since its start."""

    ran: float = 0.0
    waited: float = 0.0
    """Seconds of completed waits for a CPU."""
    is_runnable: bool = False
    """True if the thread runs or waits for a CPU now."""


def read_cpu_use(pid: int) -> CpuUse:
    """Return the CPU use of a process; all zeros if the system does not report it (macOS, or an ended process)."""
    with suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{pid}/schedstat", encoding="ascii") as file:
            ran, waited = file.read().split()[:2]
        with open(f"/proc/{pid}/stat", encoding="latin-1") as file:
            # The name of the command may contain spaces and parentheses.
            state = file.read().rpartition(")")[2].split()[0]
        return CpuUse(int(ran) / 1e9, int(waited) / 1e9, state == "R")
    return CpuUse()


@dataclass
class SampleChunk:
    """Samples that a worker received together, by their index in the caller's list."""

    number: int
    indices: list[int]
    outcomes: dict[int, ScoringOutcome] = field(default_factory=dict)
    error: str = ""
    """Reason why samples have no outcome."""

    @property
    def unscored(self) -> list[int]:
        """Indices without an outcome."""
        return [index for index in self.indices if index not in self.outcomes]


class Worker:
    """A worker process. It starts with the first sample, and again after it was killed."""

    def __init__(self, spec: FunctionSpec, timeout_seconds: float, *, concurrent: bool) -> None:
        self._spec = spec
        self._timeout = timeout_seconds
        self._limit = timeout_seconds + (_GRACE_SECONDS if concurrent else 0.0)
        self._process: Any = None
        self._connection: Connection | None = None
        self._at_exit: Any = None
        self._output: WorkerOutput | None = None
        self._chunk = SampleChunk(0, [])
        self._started = False
        self._time_limit: TimeLimit
        """Limit of the chunk since ``submit``, then of each sample."""

    @property
    def deadline(self) -> float:
        """Time (``time.monotonic()``) at which to call ``receive`` after ``submit``, also without a reply."""
        return self._time_limit.deadline

    @property
    def connection(self) -> Connection:
        """Connection that is readable when ``receive`` has something to read."""
        assert self._connection is not None
        return self._connection

    def begin_step(self) -> None:
        """Allow the process the output of another step."""
        if self._output is not None:
            self._output.begin_step()

    def submit(self, indices: list[int], items: Sequence[RewardItem]) -> None:
        """Start to score a chunk; call ``receive`` until it returns the chunk."""
        # The time limit of a sample must not include the start of the process.
        self.launch()
        self._await_start()
        self._chunk = SampleChunk(self._chunk.number + 1, indices)
        assert self._output is not None
        self._output.begin_samples(len(indices))
        self.connection.send((self._chunk.number, [items[index] for index in indices]))
        self._time_limit = TimeLimit(self._process.pid, _START_SECONDS)

    def receive(self) -> SampleChunk | None:
        """Read available replies; return the chunk when it is complete or its process was killed or died."""
        try:
            while self.connection.poll(0):
                if (reply := self._reply(self._chunk.number)) is None:
                    continue
                if reply.is_end:
                    self._chunk.error = reply.outcome.error
                    return self._chunk
                if reply.sample_index is not None:
                    self._chunk.outcomes[self._chunk.indices[reply.sample_index]] = reply.outcome
                # A reply begins the limit of the next sample.
                self._time_limit = TimeLimit(self._process.pid, self._limit)
        except Exception as error:  # The connection ended, or the function wrote something into it.
            self._chunk.error = f"the scoring process died ({self._how_it_ended(error)})"
            self.close()
            return self._chunk
        if time.monotonic() < self.deadline or self._time_limit.extend():
            return None
        # Over the limit: kill the process. The caller retries or fails the unscored samples of the chunk.
        self._chunk.error = too_slow(self._timeout)
        self.close()
        return self._chunk

    def _reply(self, chunk: int) -> Reply | None:
        """Return the next reply, or None if it does not come from this process and chunk."""
        reply = self.connection.recv()
        is_expected = isinstance(reply, Reply) and (reply.pid, reply.chunk) == (self._process.pid, chunk)
        return reply if is_expected else None

    def _how_it_ended(self, error: Exception) -> str:
        self._process.join(_EXIT_SECONDS)
        code = self._process.exitcode
        if code is None:
            return f"{type(error).__name__} on its connection"
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    def launch(self) -> None:
        """Start the process if there is none. Several workers start concurrently."""
        if self._process is not None and self._process.is_alive():
            return
        self.close()
        # spawn, because a fork would copy the trainer's CUDA context and threads.
        context = mp.get_context("spawn")
        self._connection, worker_end = context.Pipe()
        # Not a daemon in multiprocessing's sense, because daemons may not use multiprocessing themselves.
        pipes = [context.Pipe(duplex=False) for _ in ("stdout", "stderr")]
        writers = tuple(writer for _, writer in pipes)
        self._process = context.Process(target=run_worker, args=(self._spec, self._timeout, worker_end, writers))
        self._process.start()
        for end in (worker_end, *writers):
            end.close()
        self._output = WorkerOutput((pipes[0][0], pipes[1][0]))
        # Without a call of close, multiprocessing would wait for the process at exit.
        self._at_exit = util.Finalize(None, kill_process_tree, args=(self._process,), exitpriority=10)
        self._started = False

    def _await_start(self) -> None:
        if self._started:
            return
        deadline = time.monotonic() + _START_SECONDS
        try:
            while not self._started:
                if not self.connection.poll(max(0.0, deadline - time.monotonic())):
                    problem = f"it did not start in {_START_SECONDS:g} s"
                    break
                if (reply := self._reply(0)) is not None:
                    problem = reply.outcome.error
                    self._started = True
        except (EOFError, OSError) as error:
            problem = f"it died at start ({self._how_it_ended(error)})"
        if problem:
            self.close()
            raise RewardError(
                f"{self._spec.table}.function = {self._spec.name!r} cannot be used in a worker process: {problem}. "
                "Fix the import, or install the missing package into this environment"
            )

    def close(self) -> None:
        """Kill the process, if there is one, and everything that it started."""
        if self._process is not None:
            self._at_exit.cancel()
            kill_process_tree(self._process)
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None
        self._started = False
