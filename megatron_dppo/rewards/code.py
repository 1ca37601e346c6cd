"""The reward of code: the last fenced block of a response, run against the row's tests in a sandbox."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from megatron_dppo.config.reward_options import CodeOptions
from megatron_dppo.errors import RewardError
from megatron_dppo.rewards.code_tests import Assertions, FunctionCall, Lines, Test, read_tests, same_output, same_value
from megatron_dppo.rewards.item import RewardItem
from megatron_dppo.rewards.math import after_thinking
from megatron_dppo.rewards.sandbox import Limits, RunningProgram, Sandbox, SandboxError, interpreter, probe
from megatron_dppo.rewards.sandboxed import harness

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+.-]*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
_PYTHON = ("", "python", "py", "python3")
_HARNESS = Path(harness.__file__).read_text(encoding="utf-8")


class Code:
    """Scores one sample by its tests.

    Raises:
        RewardError: the interpreter does not run, or this machine gives no sandbox.
    """

    def __init__(self, options: CodeOptions, table: str) -> None:
        self._options = options
        self._sandbox = _sandbox(options, table)

    def __call__(self, item: RewardItem) -> Mapping[str, float]:
        """``score`` and ``passed``, the share of tests that passed.

        With ``score = "all"`` the first test that does not pass ends the sample: ``passed`` is then 0 or 1.

        Raises:
            ValueError: the row has no tests of a known format.
            SandboxError: the sandbox cannot be set up.
        """
        tests = self._tests(item)
        code = last_block(item.completion)
        if code is None:
            return {"score": 0.0, "passed": 0.0}
        end, passed = time.monotonic() + self._options.total_seconds, 0
        for test in tests:
            seconds = min(self._options.seconds, end - time.monotonic())
            if seconds > 0 and self._passes(code, test, seconds):
                passed += 1
            elif self._options.score == "all":
                return {"score": 0.0, "passed": 0.0}
        return {"score": passed / len(tests), "passed": passed / len(tests)}

    def _tests(self, item: RewardItem) -> list[Test]:
        key = self._options.tests_key
        if key is None:
            return read_tests(item.label, item.metadata)
        value: object = item.metadata
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise ValueError(f"the row has no column {key!r} (options.tests_key)")
            value = value[part]
        return read_tests(value, item.metadata)

    def _passes(self, code: str, test: Test, seconds: float) -> bool:
        sandbox = replace(self._sandbox, limits=replace(self._sandbox.limits, seconds=seconds))
        if isinstance(test, Lines):
            ended = RunningProgram(sandbox, {"main.py": code}, stdin=test.stdin).finish()
            return ended.code == 0 and same_output(ended.output, test.expected)
        files = {"harness.py": _HARNESS, "solution.py": code, "preamble.py": self._options.preamble}
        if isinstance(test, FunctionCall):
            return _calls(sandbox, files, test)
        return _asserts(sandbox, files, test)


def last_block(completion: str) -> str | None:
    """The last closed fenced block of Python after the thinking; None when there is none."""
    blocks = _FENCE.findall(after_thinking(completion))
    fitting = [code for language, code in blocks if language.lower() in _PYTHON]
    return fitting[-1] if fitting else None


def _calls(sandbox: Sandbox, files: Mapping[str, str], test: FunctionCall) -> bool:
    """The result is compared here: nothing in the sandbox knows what is expected."""
    name = test.function
    function = f"{name} if '{name}' in globals() else Solution().{name}" if name.isidentifier() else name
    question = {"function": function, "args": harness.encode(list(test.args)), "kwargs": {"dict": []}}
    ended = RunningProgram(sandbox, files, ["solution"], stdin=json.dumps(question) + "\n").finish()
    try:
        answer = json.loads(ended.output.splitlines()[0])
        return same_value(harness.decode(answer["value"]), test.expected)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return False


def _asserts(sandbox: Sandbox, files: Mapping[str, str], test: Assertions) -> bool:
    """Tests in one sandbox, the solution in another, two pipes between them."""
    questions_in, questions_out = os.pipe()
    answers_in, answers_out = os.pipe()
    runs = []
    try:
        runs.append(RunningProgram(sandbox, files, ["solution"], questions_in, answers_out))
        own = {"harness.py": _HARNESS, "tests.py": test.source, "entry_point": test.entry_point}
        runs.append(RunningProgram(sandbox, own, ["tests"], answers_in, questions_out))
        for descriptor in (questions_in, questions_out, answers_in, answers_out):
            os.close(descriptor)  # so that each of the two sees the end of the other
        passed = runs[1].finish().code == harness.PASSED
        if not passed and not runs[0].was_started:
            raise SandboxError("the solution's sandbox could not be set up")
        return passed
    finally:
        for run in runs:
            run.end()


def _sandbox(options: CodeOptions, table: str) -> Sandbox:
    limits = Limits(
        seconds=options.seconds,
        memory_mb=options.memory_mb,
        disk_mb=options.disk_mb,
        processes=options.processes,
        open_files=options.open_files,
        output_kb=options.output_kb,
    )
    setting = f"{table}.function = 'code'"
    try:
        python, visible = interpreter(options.python)
    except SandboxError as error:
        raise RewardError(f"{table}.options.python = {options.python!r}: {error}") from error
    allowed = options.network == "allowed"
    sandbox = Sandbox(python, visible, True, allowed, limits)
    if not (problem := probe(sandbox)):
        return sandbox
    if not allowed:
        raise RewardError(
            f"{setting} runs programs without a network and with a root of their own, by Linux's user namespaces, "
            f"which this machine refuses: {problem}. Allow them (sysctl kernel.unprivileged_userns_clone = 1 and "
            "user.max_user_namespaces; in a container, a seccomp profile that permits unshare and mount), or set "
            f"{table}.options.network = 'allowed' to run them with limits alone"
        )
    without = replace(sandbox, namespaces=False)
    if problem := probe(without):
        raise RewardError(f"{setting}: programs cannot be run on this machine: {problem}")
    return without
