"""Agents: a program or a user function that runs one episode."""

import asyncio
import contextvars
import inspect
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from megatron_dppo.config.rollout import AgentConfig
from megatron_dppo_agents.episode import Episode
from megatron_dppo_agents.episode_rewards import AgentRun
from megatron_dppo_conversations.formats.json_values import parse_json

T = TypeVar("T")
_LAUNCHER = str(Path(__file__).with_name("launcher.py"))
OUTPUT_SECONDS = 2.0
"""Time to wait for the remaining output of a program that has exited."""
_MAX_OUTPUT = 2000
"""Last bytes of a program's output that an error message shows."""
INHERITED_VARIABLES = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TMPDIR", "LANG", "LANGUAGE", "TZ"),
    *("PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR"),
)
"""Variables of the trainer that programs get, besides ``LC_*`` and ``agent.pass_env``."""
_MARK = "MEGATRON_DPPO_PROCESS"
"""``process.reaper.VARIABLE``: the mark of processes that are killed when the trainer has ended, also by SIGKILL."""


class AgentTimeout(Exception):
    """The episode exceeded its time limit."""


@dataclass(frozen=True, kw_only=True)
class AgentTask:
    """Task of one episode."""

    prompt: str
    """Last message of the data row."""
    messages: Sequence[Mapping[str, Any]]
    """Messages of the data row; a plain string becomes a user message."""
    label: str
    metadata: Mapping[str, Any]
    """Other columns of the data row."""
    base_url: str
    api_key: str = field(repr=False)


@dataclass(frozen=True)
class AgentExit:
    """Result of an agent."""

    value: Any
    """1 or 0 by a program's exit status, or the result of a function. None if the agent did not end by itself."""
    failure: str = ""
    """Error text; empty if the agent succeeded."""
    has_timed_out: bool = False
    parts: object = None
    """Object of JSON with the rewards by name, from an environment or the last line of a program's output."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Counters of the episode, by the names of metrics."""
    runs: tuple[AgentRun, ...] = ()
    """Runs of the agents of an environment."""


def program_variables(pass_env: Collection[str]) -> dict[str, str]:
    """Return the environment variables of the trainer that a program gets."""
    names = {*INHERITED_VARIABLES, *pass_env}
    return {name: value for name, value in os.environ.items() if name in names or name.startswith("LC_")}


def marked_variables(pass_env: Collection[str]) -> dict[str, str]:
    """Return ``program_variables`` of a program that ends with the trainer."""
    return program_variables([*pass_env, _MARK])


def isolated_command(command: Sequence[str], config: AgentConfig) -> list[str]:
    """Return the command that starts a program, behind ``launcher.py`` if it is isolated."""
    if config.isolation == "none":
        return list(command)
    options = {
        "namespace": config.isolation == "namespace",
        "memory": None if config.max_memory_gb is None else int(config.max_memory_gb * 2**30),
        "cpu": config.max_cpu_seconds,
    }
    # Isolated mode: neither PYTHON* variables nor site packages run code before the isolation.
    return [sys.executable, "-I", "-S", _LAUNCHER, json.dumps(options), *command]


@contextmanager
def stop_signals_unblocked() -> Iterator[None]:
    """Unblock the stop signals, which the trainer blocks in all threads: a child process would inherit that."""
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class Agent(Protocol):
    """Something that runs episodes."""

    async def run(self, task: AgentTask) -> AgentExit:
        """Run one episode; the call is canceled at the time limit."""


class ProgramAgent:
    """A program that is started for each episode, in a new session. Its output is used only for error messages.

    Only isolated programs have their API key in their environment, because otherwise the agents of other episodes can
    read that.
    """

    def __init__(self, command: Sequence[str], config: AgentConfig) -> None:
        self._command = list(command)
        self._config = config

    async def run(self, task: AgentTask) -> AgentExit:
        """See ``Agent``."""
        environment = marked_variables(self._config.pass_env)
        environment |= endpoint_variables(task, with_keys=self._config.isolation != "none")
        try:
            status, output = await run_program(isolated_command(self._command, self._config), environment, task)
        except OSError as error:
            return AgentExit(None, f"{self._command[0]} cannot be started: {error}")
        return exit_of_program(self._command[0], status, output, task)


def endpoint_variables(task: AgentTask, *, with_keys: bool) -> dict[str, str]:
    """Return the variables by which clients of the APIs find the endpoint, with its key or without."""
    variables = {}
    for api, address in (("OPENAI", task.base_url), ("ANTHROPIC", task.base_url.removesuffix("/v1"))):
        variables[f"{api}_BASE_URL"] = address
        if with_keys:
            variables[f"{api}_API_KEY"] = task.api_key
    return variables


def exit_of_program(name: str, status: int, output: bytes | bytearray, task: AgentTask) -> AgentExit:
    """Return the result of a program that has ended."""
    if status == 0:
        return AgentExit(1.0, parts=_last_object(output))
    last = output.decode("utf-8", "replace").strip().replace(task.api_key, "***")
    return AgentExit(0.0, f"{name} ended with status {status}: {last or 'it wrote nothing'}")


class _ProgramProtocol(asyncio.subprocess.SubprocessStreamProtocol):
    """Streams of a program, and the moment at which its process ends.

    ``Process.wait`` waits for the end of the pipes, too, which children of the program may hold open.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(limit=1 << 16, loop=loop)
        self.exited: asyncio.Future[None] = loop.create_future()

    def process_exited(self) -> None:
        super().process_exited()
        if not self.exited.done():
            self.exited.set_result(None)


async def run_program(
    command: Sequence[str], environment: Mapping[str, str], task: AgentTask
) -> tuple[int, bytes | bytearray]:
    """Run a program in a new session, with a task on its standard input; ``OSError`` if it cannot be started.

    Returns its exit status and the end of its output. Its session is killed at the end.
    """
    pipe = asyncio.subprocess.PIPE
    output = bytearray()
    loop = asyncio.get_running_loop()
    with stop_signals_unblocked():
        transport, protocol = await loop.subprocess_exec(
            _ProgramProtocol,
            *command,
            stdin=pipe,
            stdout=pipe,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    process = asyncio.subprocess.Process(transport, protocol, loop)
    try:
        # Together: a program that writes before it reads would otherwise block both sides.
        streams = asyncio.gather(_write_task(process, asdict(task)), _read_output(process, output))
        try:
            await protocol.exited
            with suppress(TimeoutError):  # a child process that is still running may hold the output open
                await asyncio.wait_for(streams, OUTPUT_SECONDS)
        finally:
            streams.cancel()
            await asyncio.wait([streams])
            if not streams.cancelled():
                streams.exception()  # marks it as retrieved: asyncio reports an exception that is never read
    finally:
        # Also after a normal exit: children that are still running are in its process group.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # A child may keep the pipes open, and a transport that outlives its event loop raises when it is collected.
        transport.close()
    status = process.returncode
    assert status is not None, "the process has exited"
    return status, output


class FunctionAgent:
    """A user function; each episode of one that is not ``async`` runs in a thread of its own.

    A thread pool is smaller than the number of episodes. With the local engine those in the pool would then wait for
    turns of those outside of it, and with servers few would run at once.
    """

    def __init__(self, function: Callable[[AgentTask], Any]) -> None:
        self._function = function

    async def run(self, task: AgentTask) -> AgentExit:
        """See ``Agent``."""
        try:
            if inspect.iscoroutinefunction(self._function):
                return AgentExit(await self._function(task))
            return AgentExit(await _run_in_thread(lambda: self._function(task)))
        except (Exception, SystemExit) as error:
            # ``SystemExit`` would otherwise end the event loop, and with it the trainer.
            return AgentExit(None, f"{type(error).__name__}: {error}".replace(task.api_key, "***")[:_MAX_OUTPUT])


async def _run_in_thread(function: Callable[[], Any]) -> Any:
    """Return the result of a function, which runs in a new thread.

    A thread cannot be ended. When the call is canceled it goes on, and does not keep the process from exiting.
    """
    result: Future[Any] = Future()
    # Not to be cancelled by that of its caller, before it has a result.
    result.set_running_or_notify_cancel()

    def work() -> None:
        try:
            result.set_result(function())
        except StopIteration as error:  # a future of asyncio cannot hold it
            result.set_exception(RuntimeError(f"StopIteration: {error}"))
        except BaseException as error:
            result.set_exception(error)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(work,), name="agent-function", daemon=True).start()
    return await asyncio.wrap_future(result)


async def run_with_time_limit(work: Coroutine[Any, Any, T], episode: Episode, seconds: float) -> T:
    """Run ``work`` and return its result.

    It is canceled when the agent itself has taken more than ``seconds`` (``AgentTimeout``), or when the episode is
    interrupted, whose exception is raised.
    """
    task = asyncio.create_task(work)
    try:
        # Only the agent's own time counts, so the limit moves while the policy samples.
        while not task.done():
            remaining = seconds - episode.calls.clock.seconds()
            if remaining <= 0:
                raise AgentTimeout
            futures: set[asyncio.Future[Any]] = {task, episode.calls.interrupted}
            await asyncio.wait(futures, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
            if episode.calls.interrupted.done():
                episode.calls.interrupted.result()
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _last_object(output: bytes | bytearray) -> object:
    """Return the last line of a program's output, as the value of its JSON if it is JSON."""
    lines = output.decode("utf-8", "replace").strip().splitlines() or [""]
    try:
        return parse_json(lines[-1])
    except ValueError:
        return lines[-1]


async def _write_task(process: asyncio.subprocess.Process, fields: Mapping[str, object]) -> None:
    assert process.stdin is not None
    with suppress(ConnectionError):  # the program need not read its input
        process.stdin.write(json.dumps(fields, default=str).encode() + b"\n")
        await process.stdin.drain()
        process.stdin.close()


async def _read_output(process: asyncio.subprocess.Process, output: bytearray) -> None:
    assert process.stdout is not None
    while part := await process.stdout.read(1 << 16):
        output += part
        del output[:-_MAX_OUTPUT]
