"""Agents that are environments of the package verifiers: one process plays the episodes of a rank."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_dppo.config.rollout import AgentConfig
from megatron_dppo.errors import GenerateError
from megatron_dppo_agents.episode_rewards import AgentRun
from megatron_dppo_agents.runner import (
    OUTPUT_SECONDS,
    AgentExit,
    AgentTask,
    isolated_command,
    marked_variables,
    stop_signals_unblocked,
)

_PROGRAM = str(Path(__file__).with_name("verifiers_program.py"))
_START_SECONDS = 300.0
"""Time to import the package, read the tasks and start servers of tools."""
_END_SECONDS = 10.0
_MAX_LINES = 40
"""Last lines of the process's output that an error message shows."""
_MAX_COUNTS = 64
"""Rewards and metrics of an episode that become metrics of the run."""


class EnvironmentAgent:
    """An environment of verifiers 0.4 in a process of its own, which starts with the first episode.

    A process that ends by itself fails the episodes in progress; the next episode starts another.
    """

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._process: EnvironmentProcess | None = None

    async def run(self, task: AgentTask) -> AgentExit:
        """See ``runner.Agent``. The task of the data row is named by its column ``task``."""
        key = task.metadata.get("task")
        if not isinstance(key, str):
            return AgentExit(
                None,
                f"the data row has no column 'task' with the key of a task, but {key!r:.80}; write the rows of "
                "data.train by `megatron-dppo tasks`",
            )
        process = await asyncio.to_thread(self._started)
        number = next(self._numbers)
        fields = {"id": number, "task": key, "base_url": task.base_url, "api_key": task.api_key}
        future = process.ask(number, fields)
        try:
            reply = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            process.send({"cancel": number})
            raise
        except GenerateError as error:
            return AgentExit(None, str(error).replace(task.api_key, "***"))
        failure = str(reply["failure"]).replace(task.api_key, "***")
        runs = tuple(AgentRun(**run) for run in reply["runs"])
        counts = _counts("reward", reply["rewards"]) | _counts("metric", reply["metrics"])
        if len({run.agent for run in runs}) > 1:
            counts |= _counts("agent_reward", _mean_rewards(runs))
        parts = {"rewards": reply["rewards"]}
        failure = failure and f"the environment failed: {failure}"
        return AgentExit(None, failure, parts=parts, counts=counts, runs=runs)

    async def start(self) -> None:
        """Start the process if there is none. An episode's time limit does not cover this."""
        await asyncio.to_thread(self._started)

    def tasks(self) -> list[dict[str, Any]]:
        """Return the tasks as rows of data."""
        return self._started().tasks()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            if self._process is not None:
                self._process.close()
                self._process = None

    def _started(self) -> EnvironmentProcess:
        with self._lock:
            if self._process is None or self._process.has_ended:
                if self._process is not None:
                    self._process.close()  # ends programs that it left behind
                self._process = EnvironmentProcess(self._config)
            return self._process


class EnvironmentProcess:
    """The process and its pipes. One thread reads its replies, and another waits for its end."""

    def __init__(self, config: AgentConfig) -> None:
        assert config.environment is not None and config.environment_python is not None
        self._name = f"agent.environment = {config.environment!r}"
        self._ready: Future[dict[str, Any]] = Future()
        self._tasks: Future[dict[str, Any]] = Future()
        self._replies: dict[int, Future[dict[str, Any]]] = {}
        self._last_lines: deque[str] = deque(maxlen=_MAX_LINES)
        self._write_lock = threading.Lock()
        self.has_ended = False
        python = config.environment_python
        try:
            with stop_signals_unblocked():
                self._process = subprocess.Popen(
                    isolated_command([python, _PROGRAM], config),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=marked_variables(config.pass_env),
                    text=True,
                    errors="replace",
                    start_new_session=True,
                )
        except OSError as error:
            raise GenerateError(f"agent.environment_python = {python!r} cannot be started: {error}") from error
        threading.Thread(target=self._read_errors, name="environment-errors", daemon=True).start()
        self._reader = threading.Thread(target=self._read_replies, name="environment", daemon=True)
        self._reader.start()
        threading.Thread(target=self._wait_for_end, name="environment-end", daemon=True).start()
        given: Any = config.environment_options.get("taskset", {})
        taskset = {**given, "id": config.environment.partition(":")[2]}
        options = {**config.environment_options, "taskset": taskset}
        self.send({"options": options, "untrained_agents": config.untrained_agents})
        try:
            reply = self._ready.result(_START_SECONDS)
        except TimeoutError:
            self.close()
            raise GenerateError(f"{self._name} did not start within {_START_SECONDS:g} s: {self._output}") from None
        if "error" in reply:
            self.close()
            raise GenerateError(f"{self._name} cannot be used: {reply['error']}")

    def tasks(self) -> list[dict[str, Any]]:
        """Return the tasks as rows of data."""
        self.send({"tasks": True})
        rows: list[dict[str, Any]] = self._tasks.result(_START_SECONDS)["tasks"]
        return rows

    def ask(self, number: int, fields: Mapping[str, Any]) -> Future[dict[str, Any]]:
        """Begin an episode; the future raises a ``GenerateError`` if the process ends before its reply."""
        future: Future[dict[str, Any]] = Future()
        self._replies[number] = future
        if self.has_ended:
            self._fail_all()
        else:
            self.send(fields)
        return future

    def send(self, fields: Mapping[str, Any]) -> None:
        """Write a message to the process."""
        assert self._process.stdin is not None
        # The process may have ended; its reader fails the episodes then.
        with self._write_lock, suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(fields) + "\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Close the input of the process and wait for its end."""
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Also after a normal end: programs that it started are in its process group.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    @property
    def _output(self) -> str:
        return "\n".join(self._last_lines).strip() or "it wrote nothing"

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._last_lines.append(line.rstrip()[:500])

    def _read_replies(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            reply = json.loads(line)
            if "ready" in reply or "error" in reply:
                self._ready.set_result(reply)
            elif "tasks" in reply:
                self._tasks.set_result(reply)
            elif (future := self._replies.pop(reply["id"], None)) is not None and not future.cancelled():
                future.set_result(reply)

    def _wait_for_end(self) -> None:
        self._process.wait()
        self._reader.join(OUTPUT_SECONDS)  # a child process that is still running may hold the output open
        self.has_ended = True
        self._fail_all()

    def _fail_all(self) -> None:
        status = self._process.wait()
        error = GenerateError(f"{self._name}: its process ended with status {status}: {self._output}")
        for future in (self._ready, self._tasks, *self._replies.values()):
            if not future.done():
                future.set_exception(error)
        self._replies.clear()


def _counts(kind: str, values: Mapping[str, float]) -> dict[str, float]:
    """Return rewards or metrics by the names of the run's metrics."""
    names: Sequence[str] = sorted(values)[:_MAX_COUNTS]
    return {f"agent/{kind}/{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}": float(values[name]) for name in names}


def _mean_rewards(runs: Sequence[AgentRun]) -> dict[str, float]:
    rewards: dict[str, list[float]] = {}
    for run in runs:
        rewards.setdefault(run.agent, []).append(run.reward)
    return {agent: sum(values) / len(values) for agent, values in rewards.items()}
