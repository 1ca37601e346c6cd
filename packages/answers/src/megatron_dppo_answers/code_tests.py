"""Tests of code in the formats of public data sets: inputs with outputs, calls with results, assertions."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from typing import Any


@dataclass(frozen=True)
class StdioTest:
    """A test of a program that reads standard input and writes standard output."""

    stdin: str
    expected: str


@dataclass(frozen=True)
class CallTest:
    """A test that calls a function with plain data."""

    function: str
    args: Sequence[object]
    expected: object


@dataclass(frozen=True)
class AssertionTest:
    """Code with assertions about functions of the solution."""

    source: str
    entry_point: str
    """Function that the tests call ``candidate``. Empty if there is none."""


CodeTest = StdioTest | CallTest | AssertionTest


def read_tests(value: object, metadata: Mapping[str, object]) -> list[CodeTest]:
    """Return the tests of a row.

    Args:
        value: A table, a list, or a string that contains either as JSON, or Python code.
        metadata: Other columns of the row: ``entry_point``, ``fn_name`` or ``func_name``, ``test_setup_code``.

    Raises:
        ValueError: The format is unknown.
    """
    # JSON in a text; any other text is Python code.
    if isinstance(value, str):
        with suppress(ValueError):
            loaded = json.loads(value)
            value = loaded if isinstance(loaded, dict | list) else value
    if isinstance(value, str) and value.strip():
        return [_assertions([value], metadata)]
    if isinstance(value, Mapping):
        tests = _tests_from_table(value, metadata)
    elif isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        tests = [_assertions([each], metadata) for each in value]
    elif isinstance(value, list) and all(isinstance(each, Mapping) and "input" in each for each in value):
        function = _function({}, metadata)
        tests = [_pair(function, each["input"], each["output"]) for each in value]
    else:
        tests = []
    if not tests:
        raise ValueError(
            "expected tests as {'inputs': [...], 'outputs': [...]} with or without 'fn_name', as a list of "
            f"{{'input', 'output'}}, as {{'test', 'entry_point'}}, or as assertions; got {str(value)[:200]!r}"
        )
    return tests


def _function(table: Mapping[str, object], metadata: Mapping[str, object]) -> str:
    inner = metadata.get("metadata")
    for columns in (table, metadata, inner if isinstance(inner, Mapping) else {}):
        for key in ("fn_name", "func_name"):
            if columns.get(key):
                return str(columns[key])
    return ""


def _tests_from_table(table: Mapping[str, Any], metadata: Mapping[str, object]) -> list[CodeTest]:
    if "inputs" in table and "outputs" in table:
        inputs, outputs = table["inputs"], table["outputs"]
        if len(inputs) != len(outputs):
            raise ValueError(f"expected as many outputs as inputs, got {len(inputs)} inputs and {len(outputs)} outputs")
        function = _function(table, metadata)
        return [_pair(function, given, expected) for given, expected in zip(inputs, outputs, strict=True)]
    for key in ("test", "test_list", "assert_case"):
        if key in table:
            sources = [table[key]] if isinstance(table[key], str) else table[key]
            return [_assertions([source], {**metadata, **table}) for source in sources]
    return []


def _assertions(sources: Sequence[str], metadata: Mapping[str, object]) -> AssertionTest:
    setup = metadata.get("test_setup_code") or ""
    return AssertionTest("\n".join([str(setup), *sources]), str(metadata.get("entry_point") or ""))


def _pair(function: str, given: object, expected: object) -> CodeTest:
    if not function:
        return StdioTest(_as_text(given), _as_text(expected))
    if isinstance(given, str):  # One JSON argument per line.
        given = [json.loads(line) for line in given.splitlines() if line.strip()]
    if isinstance(expected, str):
        with suppress(ValueError):  # Not JSON: the function returns a string.
            expected = json.loads(expected)
    return CallTest(function, given if isinstance(given, list) else [given], expected)


def _as_text(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,6})?")
_PADDED = re.compile(r"[+-]?0\d+")
"""An integer with leading zeros, as in a time or a code: not the number without them."""
_RELATIVE, _ABSOLUTE = Decimal("1e-5"), Decimal("1e-8")
"""Tolerances of the harnesses of APPS and TACO (``numpy.allclose``)."""
# Without traps, so that absurd exponents give infinities instead of errors.
_EXACT = Context(prec=60, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])


def same_output(actual: str, expected: str) -> bool:
    """Return True if two outputs have the same lines, ignoring white space at the ends of lines and output.

    Numbers are compared by value, as LiveCodeBench does (``grade_stdio``): integers of any length exactly. If the
    expected number has a decimal point or an exponent, the tolerances of APPS and TACO apply.
    """
    ours, theirs = ([line.strip() for line in text.strip().split("\n")] for text in (actual, expected))
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def _same_line(actual: str, expected: str) -> bool:
    if actual == expected:
        return True
    ours, theirs = actual.split(), expected.split()
    return len(ours) == len(theirs) and all(map(_same_word, ours, theirs))


def _same_word(actual: str, expected: str) -> bool:
    if actual == expected:
        return True
    if not (_NUMBER.fullmatch(actual) and _NUMBER.fullmatch(expected)):
        return False
    if _PADDED.fullmatch(actual) or _PADDED.fullmatch(expected):
        return False
    number, wanted = Decimal(actual), Decimal(expected)
    is_float = any(sign in expected for sign in ".eE")
    return number == wanted or (is_float and _is_close(number, wanted))


def _is_close(number: Decimal, wanted: Decimal) -> bool:
    difference = _EXACT.abs(_EXACT.subtract(number, wanted))
    allowed = _EXACT.add(_ABSOLUTE, _EXACT.multiply(_RELATIVE, _EXACT.abs(wanted)))
    return difference.is_finite() and difference <= allowed


def same_value(actual: object, expected: object) -> bool:
    """Return True if a result is the expected one, or the only element of the expected list.

    TACO and APPS wrap a single result in a list. Floats have their tolerances, at any depth.
    """
    if _same(actual, expected):
        return True
    return isinstance(expected, list) and len(expected) == 1 and _same(actual, expected[0])


def _same(actual: Any, expected: Any) -> bool:
    if isinstance(actual, list | tuple) and isinstance(expected, list | tuple):
        return len(actual) == len(expected) and all(map(_same, actual, expected))
    if isinstance(actual, dict) and isinstance(expected, dict):
        texts = {str(key): value for key, value in actual.items()}  # JSON keys are always strings.
        return texts.keys() == expected.keys() and all(_same(texts[key], expected[key]) for key in texts)
    # bool is a subclass of int: without this check True would equal 1.
    if isinstance(actual, bool) != isinstance(expected, bool):
        return False
    if isinstance(actual, int | float) and isinstance(expected, int | float):
        # Two integers have no tolerance. Decimal, because a large integer does not fit into a float.
        is_float = isinstance(actual, float) or isinstance(expected, float)
        return actual == expected or (is_float and _is_close(Decimal(actual), Decimal(expected)))
    return type(actual) is type(expected) and bool(actual == expected)
