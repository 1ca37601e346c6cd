"""One process that scores samples and can be killed: real time limits for code that may never return."""

from __future__ import annotations

import importlib
import math
import multiprocessing as mp
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from megatron_dppo.errors import RewardError
from megatron_dppo.rewards.math import math_reward

RewardFunction = Callable[..., float]
_START_SECONDS = 120.0
"""Limit for starting a process and importing the function."""


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
    function = load_function(name)
    connection.send("ready")
    while True:
        try:
            arguments = connection.recv()
        except EOFError:
            return
        try:
            value = float(function(**arguments))
            if not math.isfinite(value):
                raise ValueError(f"the reward must be a finite number, got {value}")
            connection.send((value, ""))
        except Exception as error:
            connection.send((0.0, f"{type(error).__name__}: {error}"))


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

    def submit(self, arguments: Mapping[str, Any]) -> None:
        """Start scoring one sample; ``result`` must follow."""
        if self._process is None or not self._process.is_alive():
            self._start()
        assert self._connection is not None
        self._connection.send(dict(arguments))

    def result(self) -> tuple[float, str]:
        """The reward and an empty text, or 0 and what went wrong."""
        assert self._connection is not None
        if not self._connection.poll(self._timeout):
            self.close()
            return 0.0, f"took longer than reward.timeout_seconds = {self._timeout:g} and was stopped"
        try:
            value, error = self._connection.recv()
        except EOFError:
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
            self._connection.recv()
        except EOFError as error:
            raise RewardError(f"reward.function = {self._name!r}: its process died at start") from error

    def close(self) -> None:
        """Kill the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None
