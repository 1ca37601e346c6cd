"""The reward ``code``: the last fenced block of a response, run against the row's tests in a sandbox."""

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from megatron_dppo.config.reward_options import CodeOptions
from megatron_dppo.errors import RewardError
from megatron_dppo.rewards.item import RewardItem
from megatron_dppo_answers.code_tests import (
    AssertionTest,
    CallTest,
    CodeTest,
    StdioTest,
    read_tests,
    same_output,
    same_value,
)
from megatron_dppo_answers.sandbox import Limits, RunningProgram, Sandbox, SandboxError, interpreter, probe
from megatron_dppo_answers.sandboxed import harness
from megatron_dppo_answers.thinking import after_thinking

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+.-]*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
_MAX_DIGITS = 100_000
"""Longest integer in a table of tests or a result; twice LiveCodeBench's."""
_PYTHON = ("", "python", "py", "python3")
_HARNESS = Path(harness.__file__).read_text(encoding="utf-8")


@contextmanager
def _long_integers() -> Iterator[None]:
    """Read integers longer than Python's default of 4,300 digits, which tests and results may have."""
    # The limit belongs to the whole process: everything else keeps its own.
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(max(_MAX_DIGITS, before))
    try:
        yield
    finally:
        sys.set_int_max_str_digits(before)


class Code:
    """Scorer of one sample by its tests."""

    def __init__(self, options: CodeOptions, table: str) -> None:
        self._options = options
        self.sandbox = _sandbox(options, table)

    @_long_integers()
    def __call__(self, item: RewardItem) -> Mapping[str, float]:
        """Return ``score`` and ``passed``, the fraction of passed tests.

        With ``score = "all"`` the first failed test ends the sample, so that ``passed`` is 0 or 1.
        """
        tests = self._tests(item)
        code = last_block(item.completion)
        if code is None:
            return {"score": 0.0, "passed": 0.0}
        deadline = time.monotonic() + self._options.total_seconds
        passed = 0
        # A test that no longer fits into the total time counts as failed.
        for test in tests:
            seconds = min(self._options.seconds, deadline - time.monotonic())
            if seconds > 0 and self._passes(code, test, seconds):
                passed += 1
            elif self._options.score == "all":
                return {"score": 0.0, "passed": 0.0}
        return {"score": passed / len(tests), "passed": passed / len(tests)}

    def _tests(self, item: RewardItem) -> list[CodeTest]:
        key = self._options.tests_key
        if key is None:
            return read_tests(item.label, item.metadata)
        value: object = item.metadata
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise ValueError(f"the row has no column {key!r} (options.tests_key)")
            value = value[part]
        return read_tests(value, item.metadata)

    def _passes(self, code: str, test: CodeTest, seconds: float) -> bool:
        sandbox = replace(self.sandbox, limits=replace(self.sandbox.limits, seconds=seconds))
        if isinstance(test, StdioTest):
            result = RunningProgram(sandbox, {"main.py": code}, stdin=test.stdin).finish()
            return result.code == 0 and same_output(result.output, test.expected)
        files = {"harness.py": _HARNESS, "solution.py": code, "preamble.py": self._options.preamble}
        if isinstance(test, CallTest):
            return _passes_call(sandbox, files, test)
        return _passes_assertions(sandbox, files, test)


def last_block(completion: str) -> str | None:
    """Return the last closed fenced Python block after the thinking, or None."""
    blocks = _FENCE.findall(after_thinking(completion))
    python_blocks = [code for language, code in blocks if language.lower() in _PYTHON]
    return python_blocks[-1] if python_blocks else None


def _passes_call(sandbox: Sandbox, files: Mapping[str, str], test: CallTest) -> bool:
    """Call a function of the solution and compare its result here: the sandbox never sees the expected value."""
    # LeetCode-style solutions define the function as a method of a class Solution.
    name = test.function
    function = f"{name} if '{name}' in globals() else Solution().{name}" if name.isidentifier() else name
    call = {"function": function, "args": harness.encode(list(test.args)), "kwargs": {"dict": []}}
    result = RunningProgram(sandbox, files, ["solution"], stdin=json.dumps(call) + "\n").finish()
    try:
        reply = json.loads(result.output.splitlines()[0])
        return same_value(harness.decode(reply["value"]), test.expected)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return False


def _passes_assertions(sandbox: Sandbox, files: Mapping[str, str], test: AssertionTest) -> bool:
    """Run the tests in one sandbox and the solution in another, connected by two pipes."""
    calls_in, calls_out = os.pipe()
    results_in, results_out = os.pipe()
    runs = []
    try:
        runs.append(RunningProgram(sandbox, files, ["solution"], calls_in, results_out))
        test_files = {"harness.py": _HARNESS, "tests.py": test.source, "entry_point": test.entry_point}
        runs.append(RunningProgram(sandbox, test_files, ["tests"], results_in, calls_out))
        for descriptor in (calls_in, calls_out, results_in, results_out):
            # With our copies closed, each program sees the end of file when the other one exits.
            os.close(descriptor)
        # Only the exit code of the tests counts; a solution cannot forge it, because it runs in another sandbox.
        passed = runs[1].finish().code == harness.PASSED
        if not passed and not runs[0].was_started:
            raise SandboxError("the solution's sandbox could not be set up")
        return passed
    finally:
        for run in runs:
            run.kill()


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
        raise RewardError(
            f"{table}.options.python = {options.python!r}: {error}. Name a Python interpreter of this machine"
        ) from error
    allowed = options.network == "allowed"
    sandbox = Sandbox(python, visible, True, allowed, limits)
    if not (problem := probe(sandbox)):
        return sandbox
    if not allowed:
        raise RewardError(
            f"{setting} isolates programs from network and files with Linux user namespaces, which this machine "
            f"refuses: {problem}. Allow them (`sysctl -w user.max_user_namespaces=15000`, on Debian also "
            "kernel.unprivileged_userns_clone=1, on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0; in a "
            "container, a seccomp profile that permits unshare and mount), or set "
            f"{table}.options.network = 'allowed' to run programs with resource limits only"
        )
    # The machine has no namespaces, and the options allow the network: use resource limits only.
    without_namespaces = replace(sandbox, namespaces=False)
    if problem := probe(without_namespaces):
        raise RewardError(
            f"{setting}: programs cannot be run on this machine: {problem}. Fix this cause, or use another "
            "reward function"
        )
    return without_namespaces
