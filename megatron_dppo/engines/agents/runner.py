"""Starts an agent for an episode and waits for its end: a program, or a function of the user's."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

from megatron_dppo.engines.agents.episode import Episode

T = TypeVar("T")
_REST_SECONDS = 2.0
"""So long the rest of a program's output is waited for when it has ended."""
_KEPT_OUTPUT = 2000
"""Bytes of a program's output that are told when it fails."""
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
_RANK_PREFIXES = ("TORCHELASTIC_", "MASTER_PORT")


class AgentTooSlow(Exception):
    """The episode took longer than it may."""


@dataclass(frozen=True, kw_only=True)
class AgentTask:
    """What an agent is given."""

    prompt: str
    """the last message of the data row"""
    messages: Sequence[Mapping[str, Any]]
    """the row's messages; a plain string is one of the user's"""
    label: str
    metadata: Mapping[str, Any]
    """the other columns of the row"""
    base_url: str
    api_key: str = field(repr=False)


@dataclass(frozen=True)
class AgentExit:
    """How an agent ended."""

    value: Any
    """1 or 0 for a program's exit status, or what a function returned; None = it has no end of its own"""
    failure: str = ""
    too_slow: bool = False


class Agent(Protocol):
    """Plays episodes."""

    async def play(self, task: AgentTask) -> AgentExit:
        """One episode; cancelled when it takes too long."""


class Program:
    """A program, started for each episode in a session of its own. What it writes is not read but for a message.

    Args:
        command: program and arguments.
        hidden: names of environment variables that it does not get.
    """

    def __init__(self, command: Sequence[str], hidden: Collection[str]) -> None:
        self._command, self._hidden = list(command), {*hidden, *_RANK_VARIABLES}

    async def play(self, task: AgentTask) -> AgentExit:
        """See ``Agent``."""
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in self._hidden and not name.startswith(_RANK_PREFIXES)
        } | {"OPENAI_BASE_URL": task.base_url, "OPENAI_API_KEY": task.api_key}
        said = bytearray()
        try:
            process = await self._start(environment)
        except OSError as error:
            return AgentExit(None, f"{self._command[0]} cannot be started: {error}")
        try:
            given = {name: value for name, value in asdict(task).items() if name not in ("base_url", "api_key")}
            streams = asyncio.gather(_write(process, given), _read(process, said))
            try:
                status = await process.wait()
                with suppress(TimeoutError):  # what it left running may hold its output open
                    await asyncio.wait_for(streams, _REST_SECONDS)
            finally:
                streams.cancel()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if status == 0:
            return AgentExit(1.0)
        last = said.decode("utf-8", "replace").strip().replace(task.api_key, "***")
        return AgentExit(0.0, f"{self._command[0]} ended with status {status}: {last or 'it wrote nothing'}")

    async def _start(self, environment: Mapping[str, str]) -> asyncio.subprocess.Process:
        # The trainer blocks the signals that stop it in all of its threads, and a program would keep that.
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        try:
            pipe = asyncio.subprocess.PIPE
            return await asyncio.create_subprocess_exec(
                *self._command,
                stdin=pipe,
                stdout=pipe,
                stderr=asyncio.subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class Function:
    """A function of the user's: ``async``, or else in a thread."""

    def __init__(self, function: Callable[[AgentTask], Any]) -> None:
        self._function = function

    async def play(self, task: AgentTask) -> AgentExit:
        """See ``Agent``."""
        try:
            if inspect.iscoroutinefunction(self._function):
                return AgentExit(await self._function(task))
            return AgentExit(await asyncio.to_thread(self._function, task))
        except (Exception, SystemExit) as error:
            return AgentExit(None, f"{type(error).__name__}: {error}".replace(task.api_key, "***")[:_KEPT_OUTPUT])


async def within(work: Coroutine[Any, Any, T], episode: Episode, seconds: float) -> T:
    """What ``work`` gives; it is cancelled when the episode takes longer on its own, or is broken.

    Raises:
        AgentTooSlow: it took longer.
        BaseException: what broke the episode.
    """
    task = asyncio.create_task(work)
    try:
        while not task.done():
            left = seconds - episode.own_seconds()
            if left <= 0:
                raise AgentTooSlow
            either: set[asyncio.Future[Any]] = {task, episode.broken}
            await asyncio.wait(either, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if episode.broken.done():
                episode.broken.result()
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _write(process: asyncio.subprocess.Process, given: Mapping[str, Any]) -> None:
    assert process.stdin is not None
    with suppress(ConnectionError):  # it may not read
        process.stdin.write(json.dumps(given, default=str).encode() + b"\n")
        await process.stdin.drain()
        process.stdin.close()


async def _read(process: asyncio.subprocess.Process, said: bytearray) -> None:
    assert process.stdout is not None
    while part := await process.stdout.read(1 << 16):
        said += part
        del said[:-_KEPT_OUTPUT]
