"""Tests of code as data sets write them: inputs with outputs, calls with results, assertions."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Lines:
    """A program that reads its input and writes its output."""

    stdin: str
    expected: str


@dataclass(frozen=True)
class FunctionCall:
    """A call of a function with plain data."""

    function: str
    args: Sequence[Any]
    expected: Any


@dataclass(frozen=True)
class Assertions:
    """Code with assertions about functions of the solution."""

    source: str
    entry_point: str
    """what ``candidate`` is; empty = there is none"""


Test = Lines | FunctionCall | Assertions


def read_tests(value: Any, metadata: Mapping[str, Any]) -> list[Test]:
    """The tests of a row.

    Args:
        value: a table, a list, or a string with either as JSON or with Python code.
        metadata: the row's other columns: ``entry_point``, ``fn_name`` or ``func_name``, ``test_setup_code``.

    Raises:
        ValueError: none of the known formats.
    """
    if isinstance(value, str):
        try:
            loaded = json.loads(value)
        except ValueError:
            loaded = None
        value = loaded if isinstance(loaded, dict | list) else value
    if isinstance(value, str) and value.strip():
        return [_assertions([value], metadata)]
    if isinstance(value, Mapping):
        tests = _of_table(value, metadata)
    elif isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        tests = [_assertions([each], metadata) for each in value]
    elif isinstance(value, list) and all(isinstance(each, Mapping) and "input" in each for each in value):
        function = _function({}, metadata)
        tests = [_pair(function, each["input"], each["output"]) for each in value]
    else:
        tests = []
    if not tests:
        raise ValueError(
            "no tests of a known format: {'inputs': [...], 'outputs': [...]} with or without 'fn_name', a list of "
            f"{{'input', 'output'}}, {{'test', 'entry_point'}}, or assertions; got {str(value)[:200]!r}"
        )
    return tests


def _function(table: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
    inner = metadata.get("metadata")
    for place in (table, metadata, inner if isinstance(inner, Mapping) else {}):
        for key in ("fn_name", "func_name"):
            if place.get(key):
                return str(place[key])
    return ""


def _of_table(table: Mapping[str, Any], metadata: Mapping[str, Any]) -> list[Test]:
    if "inputs" in table and "outputs" in table:
        inputs, outputs = table["inputs"], table["outputs"]
        if len(inputs) != len(outputs):
            raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
        function = _function(table, metadata)
        return [_pair(function, given, expected) for given, expected in zip(inputs, outputs, strict=True)]
    for key in ("test", "test_list", "assert_case"):
        if key in table:
            sources = [table[key]] if isinstance(table[key], str) else table[key]
            return [_assertions([source], {**metadata, **table}) for source in sources]
    return []


def _assertions(sources: Sequence[str], metadata: Mapping[str, Any]) -> Assertions:
    setup = metadata.get("test_setup_code") or ""
    return Assertions("\n".join([str(setup), *sources]), str(metadata.get("entry_point") or ""))


def _pair(function: str, given: Any, expected: Any) -> Test:
    if not function:
        return Lines(_as_text(given), _as_text(expected))
    if isinstance(given, str):  # one argument a line, as JSON
        given = [json.loads(line) for line in given.splitlines() if line.strip()]
    if isinstance(expected, str):
        with suppress(ValueError):  # a function that returns text
            expected = json.loads(expected)
    return FunctionCall(function, given if isinstance(given, list) else [given], expected)


def _as_text(value: Any) -> str:
    """Lines of text; lists have one line each."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def same_output(found: str, expected: str) -> bool:
    """Whether two outputs have the same lines, but for space at the ends; numbers with a point may differ by 1e-6."""
    ours, theirs = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (found, expected))
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def _same_line(found: str, expected: str) -> bool:
    if found == expected:
        return True
    ours, theirs = found.split(), expected.split()
    return len(ours) == len(theirs) and all(map(_same_word, ours, theirs))


def _same_word(found: str, expected: str) -> bool:
    if found == expected:
        return True
    if not any(sign in expected for sign in ".eE"):
        return False
    try:
        return math.isclose(float(found), float(expected), rel_tol=1e-6, abs_tol=1e-6)
    except ValueError:
        return False


def same_value(found: Any, expected: Any) -> bool:
    """Whether a result is the expected one, or the only element of the expected list, as TACO and APPS write it."""
    if _same(found, expected):
        return True
    return isinstance(expected, list) and len(expected) == 1 and _same(found, expected[0])


def _same(found: Any, expected: Any) -> bool:
    if isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(_same, found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        texts = {str(key): value for key, value in found.items()}  # JSON has no other keys
        return texts.keys() == expected.keys() and all(_same(texts[key], expected[key]) for key in texts)
    if isinstance(found, bool) != isinstance(expected, bool):
        return False
    if isinstance(found, float) or (isinstance(expected, float) and isinstance(found, int)):
        number = isinstance(expected, int | float)
        return number and (found == expected or math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-9))
    return type(found) is type(expected) and bool(found == expected)
