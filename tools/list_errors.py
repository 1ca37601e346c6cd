"""Print a table of the error texts of the package: ``python tools/list_errors.py [PATH ...]``.

One row for each place that makes a ``UserError`` or a class derived from it: file and line, class, and text with its
placeholders. The table is for review: read it as a user would, without the code. ``ValueError`` counts in ``config``
and ``losses``, whose validators turn it into a ``ConfigError``.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from source_folders import PYTHON_FILES, TRAINER

VALIDATED = ("config", "losses")
"""Packages in which a ``ValueError`` reaches the user."""


class ErrorText(NamedTuple):
    """An error that the package can raise."""

    file: Path
    line: int
    class_name: str
    text: str
    """Text with ``{expression}`` for each placeholder."""


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="folders or files; default: the trainer and its packages")
    args = parser.parse_args()
    error_classes = user_error_classes()
    print("| where | class | text |")
    print("|---|---|---|")
    for path in args.paths or PYTHON_FILES:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for error in error_texts(file, error_classes):
                text = error.text.replace("|", "\\|").replace("\n", "\\n")
                print(f"| {error.file}:{error.line} | {error.class_name} | {text} |")


def user_error_classes() -> set[str]:
    """Return the names of ``UserError`` and of all classes derived from it."""
    bases: dict[str, set[str]] = {}
    for file in PYTHON_FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                bases.setdefault(node.name, set()).update(_last_name(base) for base in node.bases)
    names = {"UserError"}
    # A class may be derived from one that a later file declares, so repeat until nothing is added.
    while derived := {name for name, parents in bases.items() if parents & names} - names:
        names |= derived
    return names


def error_texts(file: Path, error_classes: set[str]) -> Iterator[ErrorText]:
    """Yield the errors that a file makes, in its order."""
    absolute = file.resolve()
    package = absolute.relative_to(TRAINER).parts[0] if absolute.is_relative_to(TRAINER) else ""
    names = error_classes | ({"ValueError"} if package in VALIDATED else set())
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: node.lineno):
        name = _last_name(call.func)
        arguments = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg != "retry_after")]
        if name in names and arguments:
            yield ErrorText(file, call.lineno, name, ": ".join(_text(argument) for argument in arguments))


def _last_name(node: ast.expr) -> str:
    """Return ``C`` for ``C``, ``a.b.C`` and ``C[T]``."""
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _text(node: ast.expr) -> str:
    """Return a string with its placeholders; anything else as a placeholder itself."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return "{" + ast.unparse(node.value if isinstance(node, ast.FormattedValue) else node) + "}"


if __name__ == "__main__":
    main()
