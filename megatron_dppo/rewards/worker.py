"""One process that scores samples and can be killed: real time limits for code that may never return."""

from __future__ import annotations

import importlib
import math
import multiprocessing as mp
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from megatron_dppo.errors import RewardError
from megatron_dppo.rewards.math import load_parser, math_reward

RewardFunction = Callable[..., float]
_START_SECONDS = 120.0
"""Limit for starting a process and importing the function."""
_EXIT_SECONDS = 5.0
"""Limit for a process that closed its connection to end by itself."""


def load_function(name: str) -> RewardFunction:
    """``math``, or the function that ``module:function`` names.

    Raises:
        RewardError: the name has another form, the import fails, or it is not callable.
    """
    if name == "math":
        return math_reward
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise RewardError(f"reward.function = {name!r}; expected 'math' or 'module:function', e.g. 'my_rewards:score'")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except Exception as error:
        raise RewardError(
            f"reward.function = {name!r} cannot be imported: {type(error).__name__}: {error}. The module must be on "
            "PYTHONPATH or in the working directory"
        ) from error
    if not callable(function):
        raise RewardError(f"reward.function = {name!r} is not callable, but {type(function).__name__}")
    return function


def _serve(name: str, connection: Connection) -> None:
    try:
        function = load_function(name)
        if name == "math":
            load_parser()
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
        return
    connection.send("")
    while True:
        try:
            arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((_finite(function(**arguments)), ""))
        except Exception as error:
            connection.send((0.0, f"{type(error).__name__}: {error}"))


def _finite(value: Any) -> float:
    # float() would read a number out of text.
    if value is None or isinstance(value, str | bytes | bytearray):
        raise TypeError(f"the reward must be a number, got {value!r}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the reward must be a finite number, got {number}")
    return number


class Worker:
    """A scoring process, started at the first sample and restarted after a kill.

    Args:
        name: see ``load_function``.
        timeout_seconds: limit for one sample.
    """

    def __init__(self, name: str, timeout_seconds: float) -> None:
        self._name, self._timeout = name, timeout_seconds
        self._process: Any = None
        self._connection: Connection | None = None
        self._deadline = 0.0

    def submit(self, arguments: Mapping[str, Any]) -> None:
        """Start scoring one sample; ``result`` must follow."""
        if self._process is None or not self._process.is_alive():
            self._start()
        assert self._connection is not None
        self._connection.send(dict(arguments))
        self._deadline = time.monotonic() + self._timeout

    def result(self) -> tuple[float, str]:
        """The reward and an empty text, or 0 and what went wrong."""
        assert self._connection is not None
        if not self._connection.poll(max(0.0, self._deadline - time.monotonic())):
            self.close()
            return 0.0, f"took longer than reward.timeout_seconds = {self._timeout:g} and was stopped"
        try:
            value, error = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(_EXIT_SECONDS)
            code = self._process.exitcode
            self.close()
            return 0.0, f"the scoring process died (exit code {code})"
        return value, error

    def _start(self) -> None:
        self.close()
        context = mp.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._name, theirs), daemon=True)
        self._process.start()
        theirs.close()
        if not self._connection.poll(_START_SECONDS):
            self.close()
            raise RewardError(f"reward.function = {self._name!r}: its process did not start in {_START_SECONDS:g} s")
        try:
            problem = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(_EXIT_SECONDS)
            problem = f"its process died at start (exit code {self._process.exitcode})"
        if problem:
            self.close()
            raise RewardError(
                f"reward.function = {self._name!r} cannot be used in a worker process: {problem}. Mend the import, or "
                "install what it needs into this environment"
            )

    def close(self) -> None:
        """Kill the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None
