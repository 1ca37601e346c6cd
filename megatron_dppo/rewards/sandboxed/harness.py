"""Two programs of the sandbox, and how values go between them and out of it: plain data alone, never objects.

``harness.py solution`` loads ``solution.py`` and answers calls of its functions, one JSON line each. ``harness.py
tests`` runs tests whose calls of the solution go to such a process: tests and solution never share one, so that a
solution cannot change what judges it.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import sys
from typing import Any

PASSED = 77
"""Exit code of tests that ran to their end."""
_LONGEST = 1 << 22
_PLAIN = (str, int, float, bool, type(None))


def encode(value: Any) -> Any:
    """Plain data as JSON that keeps its types.

    Raises:
        TypeError: it has something else in it.
    """
    if type(value) in _PLAIN:
        return value
    if type(value) is list:
        return {"list": [encode(each) for each in value]}
    for kind in (tuple, set, frozenset):
        if type(value) is kind:
            return {kind.__name__: [encode(each) for each in value]}
    if isinstance(value, dict):  # also a Counter, a defaultdict
        return {"dict": [[encode(key), encode(each)] for key, each in value.items()]}
    if type(value) is bytes:
        return {"bytes": value.hex()}
    if type(value) is complex:
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (list, tuple, str, int, float)):  # their subclasses, as what they are
        base: Any = next(kind for kind in (bool, int, float, str, list, tuple) if isinstance(value, kind))
        return encode(base(value))
    raise TypeError(f"a {type(value).__name__} cannot be passed between tests and solution, only plain data")


def decode(value: Any) -> Any:
    """What ``encode`` was given.

    Raises:
        ValueError, TypeError: it is nothing that ``encode`` makes.
    """
    if type(value) in _PLAIN:
        return value
    if type(value) is not dict or len(value) != 1:
        raise ValueError("not an encoded value")
    ((kind, inner),) = value.items()
    if kind in ("list", "tuple", "set", "frozenset"):
        made = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind]
        return made(decode(each) for each in inner)
    if kind == "dict":
        return {decode(key): decode(each) for key, each in inner}
    if kind == "bytes":
        return bytes.fromhex(inner)
    if kind == "complex":
        return complex(*inner)
    raise ValueError(f"not an encoded value: {kind}")


def serve_solution() -> None:
    """Load ``solution.py``, then answer ``{"function", "args", "kwargs"}`` by ``{"value"}`` or ``{"error"}``."""
    answers, questions = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(0), "r")
    nothing = os.open("/dev/null", os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)  # what the solution prints is no answer
    sys.setrecursionlimit(20000)
    names: dict[str, Any] = {"__name__": "solution"}
    for file in ("preamble.py", "solution.py"):
        exec(compile(_file(file), file, "exec"), names)
    for line in questions:
        call = json.loads(line)
        try:
            function = eval(call["function"], names)
            value = function(*decode(call["args"]), **decode(call["kwargs"]))
            answer = json.dumps({"value": encode(value)})
        except Exception as error:
            answer = json.dumps({"error": type(error).__name__, "text": str(error)[:1000]})
        answers.write(answer + "\n")
        answers.flush()


class SolutionFailed(Exception):
    """The solution raised an exception that has no built-in type, or is gone."""


class _Proxy:
    """A function of the solution, called in its own process."""

    def __init__(self, function: str) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = {"function": self._function, "args": encode(args), "kwargs": encode(kwargs)}
        sys.__stdout__.write(json.dumps(call) + "\n")  # type: ignore[union-attr]
        sys.__stdout__.flush()  # type: ignore[union-attr]
        line = sys.__stdin__.readline(_LONGEST)  # type: ignore[union-attr]
        if not line.endswith("\n"):
            raise SolutionFailed("the solution has ended, or its answer is too long")
        answer = json.loads(line)
        if type(answer) is not dict:
            raise SolutionFailed("not an answer")
        if "value" in answer:
            return decode(answer["value"])
        kind = getattr(builtins, str(answer.get("error")), None)
        text = str(answer.get("text"))
        if isinstance(kind, type) and issubclass(kind, Exception):
            raise kind(text)
        raise SolutionFailed(text)


def names_of_the_solution(tests: str) -> set[str]:
    """Names that tests use and neither define, import nor get from Python: functions of the solution."""
    used: set[str] = set()
    own = {*dir(builtins), "candidate", "check"}
    for node in ast.walk(ast.parse(tests)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else own).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.arg):
            own.add(node.arg)
        elif isinstance(node, ast.alias):
            own.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            own.add(node.name)
    return used - own


def run_tests() -> None:
    """Run ``tests.py``; ``candidate`` and unknown names are functions of the solution."""
    source, entry_point = _file("tests.py"), _file("entry_point")
    names: dict[str, Any] = {"__name__": "tests"}
    names |= {name: _Proxy(name) for name in names_of_the_solution(source)}
    if entry_point:
        names["candidate"] = _Proxy(entry_point)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    sys.setrecursionlimit(20000)
    exec(compile(source, "tests.py", "exec"), names)
    if entry_point and callable(names.get("check")):
        names["check"](names["candidate"])
    os._exit(PASSED)


def _file(name: str) -> str:
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), name), encoding="utf-8") as file:
        return file.read()


if __name__ == "__main__":
    {"solution": serve_solution, "tests": run_tests}[sys.argv[1]]()
