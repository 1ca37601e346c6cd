"""Two programs of the sandbox, and the plain data that they exchange.

``harness.py solution`` loads ``solution.py`` and answers calls of its functions, one JSON line each. ``harness.py
tests`` runs tests whose calls of the solution go to such a process. Tests and solution never share a process, so a
solution cannot change its tests.
"""

import ast
import builtins
import json
import os
import sys
from typing import Any

PASSED = 77
"""Exit code of tests that ran to their end."""
_MAX_LINE = 1 << 22
_PLAIN = (str, int, float, bool, type(None))


def encode(value: object) -> object:
    """Return plain data as JSON that preserves its types."""
    if type(value) in _PLAIN:
        return value
    if type(value) is list:
        return {"list": [encode(each) for each in value]}
    for kind in (tuple, set, frozenset):
        if type(value) is kind:
            return {kind.__name__: [encode(each) for each in value]}
    if isinstance(value, dict):  # Also a Counter or a defaultdict.
        return {"dict": [[encode(key), encode(each)] for key, each in value.items()]}
    if type(value) is bytes:
        return {"bytes": value.hex()}
    if type(value) is complex:
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (list, tuple, str, int, float)):  # Subclasses become their base type.
        # bool before int, of which it is a subclass.
        base: Any = next(kind for kind in (bool, int, float, str, list, tuple) if isinstance(value, kind))
        return encode(base(value))
    raise TypeError(f"a {type(value).__name__} cannot be passed between tests and solution; use plain data")


def decode(value: object) -> object:
    """Return the value that ``encode`` received."""
    if type(value) in _PLAIN:
        return value
    if type(value) is not dict or len(value) != 1:
        raise ValueError("not an encoded value")
    ((kind, inner),) = value.items()
    if kind in ("list", "tuple", "set", "frozenset"):
        constructor = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind]
        return constructor(decode(each) for each in inner)
    if kind == "dict":
        return {decode(key): decode(each) for key, each in inner}
    if kind == "bytes":
        return bytes.fromhex(inner)
    if kind == "complex":
        return complex(*inner)
    raise ValueError(f"not an encoded value: {kind}")


def serve_solution() -> None:
    """Load ``solution.py``, then answer each ``{"function", "args", "kwargs"}`` with ``{"value"}`` or ``{"error"}``."""
    # Keep the pipes to the tests, and give the solution /dev/null: what it prints is no reply.
    replies = os.fdopen(os.dup(1), "w")
    calls = os.fdopen(os.dup(0), "r")
    nothing = os.open("/dev/null", os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    sys.setrecursionlimit(20000)
    names: dict[str, Any] = {"__name__": "solution"}
    for file in ("preamble.py", "solution.py"):
        exec(compile(_file(file), file, "exec"), names)
    for line in calls:
        call = json.loads(line)
        try:
            # A name, or an expression for a method of LeetCode's class Solution.
            function = eval(call["function"], names)
            args: Any = decode(call["args"])
            kwargs: Any = decode(call["kwargs"])
            value = function(*args, **kwargs)
            reply = json.dumps({"value": encode(value)})
        except Exception as error:
            reply = json.dumps({"error": type(error).__name__, "text": str(error)[:1000]})
        replies.write(reply + "\n")
        replies.flush()


class SolutionFailed(Exception):
    """The solution raised an exception without a built-in type, or has exited."""


class _Proxy:
    """A function of the solution, called in the solution's process."""

    def __init__(self, function: str) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = {"function": self._function, "args": encode(args), "kwargs": encode(kwargs)}
        sys.__stdout__.write(json.dumps(call) + "\n")  # type: ignore[union-attr]
        sys.__stdout__.flush()  # type: ignore[union-attr]
        line = sys.__stdin__.readline(_MAX_LINE)  # type: ignore[union-attr]
        if not line.endswith("\n"):
            raise SolutionFailed("the solution has exited, or its reply is too long")
        reply = json.loads(line)
        if type(reply) is not dict:
            raise SolutionFailed("the reply is not an object")
        if "value" in reply:
            return decode(reply["value"])
        kind = getattr(builtins, str(reply.get("error")), None)
        text = str(reply.get("text"))
        if isinstance(kind, type) and issubclass(kind, Exception):
            raise kind(text)
        raise SolutionFailed(text)


def solution_names(tests: str) -> set[str]:
    """Return the names of the solution's functions: names that tests use but neither define nor import."""
    used: set[str] = set()
    defined = {*dir(builtins), "candidate", "check"}
    for node in ast.walk(ast.parse(tests)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
    return used - defined


def run_tests() -> None:
    """Run ``tests.py``; ``candidate`` and unknown names are functions of the solution."""
    source = _file("tests.py")
    entry_point = _file("entry_point")
    names: dict[str, Any] = {"__name__": "tests"}
    names |= {name: _Proxy(name) for name in solution_names(source)}
    if entry_point:
        names["candidate"] = _Proxy(entry_point)
    # Calls go to the original stdout; what the tests print must not mix with them.
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    sys.setrecursionlimit(20000)
    exec(compile(source, "tests.py", "exec"), names)
    if entry_point and callable(names.get("check")):
        names["check"](names["candidate"])
    # At once, so that nothing that the tests have left changes the exit code.
    os._exit(PASSED)


def _file(name: str) -> str:
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), name), encoding="utf-8") as file:
        return file.read()


if __name__ == "__main__":
    {"solution": serve_solution, "tests": run_tests}[sys.argv[1]]()
