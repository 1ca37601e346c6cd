"""Print a table of the error texts of the package: ``python tools/list_errors.py [PATH ...]``.

One row for each place that makes a ``UserError`` or a class derived from it: file and line, class, and text with its
placeholders. The table is for review: read it as a user would, without the code. ``ValueError`` counts in ``config``
and ``losses``, whose validators turn it into a ``ConfigError``.

``--write`` writes the golden table instead: one sorted line for each class and text of trainer and packages, those of
every ``raise`` included. It has no places and no names of placeholders, so that it changes only with the texts.
``tests/unit/test_error_texts.py`` compares it with the code; a diff shows the reviewer what users will read.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from source_folders import PYTHON_FILES, ROOT, TRAINER

GOLDEN = ROOT / "tests" / "error_texts.txt"
"""Golden table: ``class: text`` in each line, ``{}`` for each placeholder."""

VALIDATED = ("config", "losses")
"""Packages in which a ``ValueError`` reaches the user."""


class ErrorText(NamedTuple):
    """An error that the package can raise."""

    file: Path
    line: int
    class_name: str
    text: str
    """Text with ``{expression}`` for each placeholder."""
    template: str
    """Text with ``{}`` for each placeholder."""


def main() -> None:
    """Print the table as Markdown, or write the golden one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="folders or files; default: the trainer and its packages")
    parser.add_argument("--write", action="store_true", help=f"write {GOLDEN.relative_to(ROOT)}")
    args = parser.parse_args()
    if args.write:
        GOLDEN.write_text("\n".join(golden_lines()) + "\n", "utf-8")
        return
    error_classes = user_error_classes()
    print("| where | class | text |")
    print("|---|---|---|")
    for path in args.paths or PYTHON_FILES:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for error in error_texts(file, error_classes):
                text = error.text.replace("|", "\\|").replace("\n", "\\n")
                print(f"| {error.file}:{error.line} | {error.class_name} | {text} |")


def golden_lines() -> list[str]:
    """Return the lines of the golden table."""
    classes = user_error_classes()
    lines = set[str]()
    for file in PYTHON_FILES:
        for error in error_texts(file, classes, every_raise=True):
            # A text that is a placeholder alone says nothing.
            if error.template.strip("{}: "):
                lines.add(f"{error.class_name}: {error.template}".replace("\n", "\\n"))
    return sorted(lines)


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


def error_texts(file: Path, error_classes: set[str], *, every_raise: bool = False) -> Iterator[ErrorText]:
    """Yield the errors that a file makes, in its order; with ``every_raise`` also those that no user sees."""
    absolute = file.resolve()
    package = absolute.relative_to(TRAINER).parts[0] if absolute.is_relative_to(TRAINER) else ""
    names = error_classes | ({"ValueError"} if package in VALIDATED else set())
    nodes = list(ast.walk(ast.parse(file.read_text())))
    raised = [node.exc for node in nodes if isinstance(node, ast.Raise)] if every_raise else []
    for call in sorted((node for node in nodes if isinstance(node, ast.Call)), key=lambda node: node.lineno):
        name = _last_name(call.func)
        arguments = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg != "retry_after")]
        if (name in names or call in raised) and arguments:
            text = ": ".join(_text(argument, ast.unparse) for argument in arguments)
            template = ": ".join(_text(argument, lambda _: "") for argument in arguments)
            yield ErrorText(file, call.lineno, name, text, template)


def _last_name(node: ast.expr) -> str:
    """Return ``C`` for ``C``, ``a.b.C`` and ``C[T]``."""
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _text(node: ast.expr, name: Callable[[ast.expr], str]) -> str:
    """Return a string with a name in each placeholder; anything else as a placeholder itself."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, name) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, name) + _text(node.right, name)
    return "{" + name(node.value if isinstance(node, ast.FormattedValue) else node) + "}"


if __name__ == "__main__":
    main()
