"""A function above 60 lines says in its docstring why it is not split."""

from __future__ import annotations

import ast

import pytest

import measure_structure


@pytest.mark.parametrize(
    ("lines", "docstring", "expected"),
    [
        (56, "Do it.", []),
        (57, "Do it.", [False]),
        (57, "Do it. Long because each line is a step.", [True]),
        (57, "Do it. It is long.", [False]),
    ],
)
def test_a_function_of_61_lines_needs_a_reason(lines: int, docstring: str, expected: list[bool]) -> None:
    body = "    x = 1\n" * lines
    source = f'@cache\ndef f():\n    """{docstring}"""\n    # why\n{body}    return x'
    assert list(measure_structure.long_functions(ast.parse(source))) == expected


def test_each_long_function_has_a_reason() -> None:
    missing = {
        "/".join(parts)
        for parts, text in measure_structure.sources(None)
        if False in measure_structure.long_functions(ast.parse(text))
    }
    assert not missing
