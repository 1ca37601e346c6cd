"""Print figures of the project's language: ``python tools/measure_language.py [--list] [--pages] [PATH ...]``.

Without options: one row for each package of ``megatron_dppo`` (or each given path) with its comments, docstrings and
names that break the rules of CONTRIBUTING.md. ``--list`` prints each finding as ``file:line: text``. ``--pages`` prints
sentence lengths and code blocks of README and docs instead.
"""

from __future__ import annotations

import argparse
import ast
import io
import itertools
import re
import statistics
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from source_folders import PACKAGES, PAGES, PYTHON_FILES, TRAINER

BANNED_WORDS = frozenset(
    ["found", "told", "own", "place", "kept", "whole", "others", "again", "mine", "away", "asking", "handed"]
)
"""Parts of names (split at underscores and capitals) that say nothing or belong to no field."""
BANNED_NAMES = frozenset({"seen", "this_try", "ended", "rest", "come", "lesson", "taught", "teaching"})
"""Whole names."""
ALLOWED_NAMES = frozenset({"in_place"})
"""Names of the field that hold a banned word."""
BAD_OPENINGS = frozenset(["what", "whether", "who", "whose", "of", "that", "how"])
"""First words of a docstring that describe nothing: a function starts with a verb, anything else with a noun."""
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


class Finding(NamedTuple):
    """A place that breaks a rule."""

    rule: str
    """``name``, ``docstring`` or ``assignment``."""
    line: int
    text: str


def main() -> None:
    """Print the table that the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="folders or files; default: each package")
    parser.add_argument("--list", action="store_true", help="print each finding")
    parser.add_argument("--pages", action="store_true", help="print sentence lengths and code blocks of the pages")
    args = parser.parse_args()
    if args.pages:
        print_pages(args.paths or PAGES)
    elif args.list:
        for file in python_files(args.paths or PYTHON_FILES):
            for finding in findings(file.read_text()):
                print(f"{file}:{finding.line}: {finding.rule}: {finding.text}")
    else:
        folders = [path for path in sorted(TRAINER.iterdir()) if path.is_dir()]
        print_packages(args.paths or [*folders, *PACKAGES.values()])


def print_packages(paths: list[Path]) -> None:
    """Print one row for each path: lines, comments, findings by rule and uses of ``Any``."""
    print("| | lines | comments, % of lines | names | docstrings | assignments | Any |")
    print("|---|---|---|---|---|---|---|")
    for path in paths:
        texts = [file.read_text() for file in python_files([path])]
        if not texts:
            continue
        lines = sum(text.count("\n") for text in texts)
        comments = sum(count_comments(text) for text in texts)
        rules = [finding.rule for text in texts for finding in findings(text)]
        counts = " | ".join(str(rules.count(rule)) for rule in ("name", "docstring", "assignment"))
        uses_of_any = sum(len(re.findall(r"\bAny\b", text)) for text in texts)
        print(f"| {path.name} | {lines} | {100 * comments / lines:.1f} | {counts} | {uses_of_any} |")


def print_pages(pages: list[Path]) -> None:
    """Print one row for each page: sentences, mean and longest sentence in words, and code blocks."""
    print("| page | sentences | mean words | longest | above 25 | code blocks |")
    print("|---|---|---|---|---|---|")
    for page in pages:
        text = page.read_text()
        lengths = [len(sentence.split()) for sentence in sentences(text)] or [0]
        above = sum(length > 25 for length in lengths)
        blocks = len(re.findall(r"^ *```", text, re.MULTILINE)) // 2
        mean = statistics.fmean(lengths)
        print(f"| {page.name} | {len(lengths)} | {mean:.1f} | {max(lengths)} | {above} | {blocks} |")


def sentences(markdown: str) -> list[str]:
    """Split the prose of a page into sentences; code blocks, tables, headings and link targets do not count."""
    prose = re.sub(r"```.*?```", "\n\n", markdown, flags=re.DOTALL)
    prose = re.sub(r"<!--.*?-->|<[^>]+>", "", prose, flags=re.DOTALL)
    prose = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", prose)
    prose = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose)
    prose = re.sub(r"^\s*(\|.*|#.*|---+|\$\$.*)$", "\n", prose, flags=re.MULTILINE)
    # A list item is a block of its own.
    prose = re.sub(r"^\s*([-*]|\d+\.)\s+", "\n\n", prose, flags=re.MULTILINE)
    blocks = [" ".join(block.split()) for block in re.split(r"\n\s*\n", prose)]
    parts = [part for block in blocks for part in re.split(r"(?<=[.!?:;])[\"')*_]*\s+(?=[A-Z`\"'(*_0-9])", block)]
    return [part for part in parts if len(part.split()) > 2]


def python_files(paths: Sequence[Path]) -> list[Path]:
    """Return the Python files below the paths."""
    return [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]


def count_comments(source: str) -> int:
    """Return the number of comments, without those that address a tool."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    return sum(not re.match(r"#\s*(type:|noqa|pragma|ruff|!)", comment) for comment in comments)


def findings(source: str) -> Iterator[Finding]:
    """Yield everything in a module that breaks a rule."""
    tree = ast.parse(source)
    yield from _name_findings(tree)
    yield from docstring_findings(tree)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Tuple)
            and isinstance(node.targets[0], ast.Tuple)
        ):
            count = len(node.value.elts)
            if count >= 3:
                yield Finding("assignment", node.lineno, f"{count} values in one statement")


def _name_findings(tree: ast.Module) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if isinstance(node, (*FUNCTION, ast.ClassDef)):
            name = node.name
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        else:
            continue
        is_function = isinstance(node, FUNCTION)
        if is_banned(name, is_function):
            yield Finding("name", node.lineno, name)


def is_banned(name: str, is_function: bool) -> bool:
    """Return whether a name holds a banned word or, of a function, begins or ends with ``of``."""
    plain = name.strip("_")
    if plain.lower() in ALLOWED_NAMES:
        return False
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", plain)]
    named_of = is_function and len(words) > 1 and "of" in (words[0], words[-1])
    return named_of or plain.lower() in BANNED_NAMES or not BANNED_WORDS.isdisjoint(words)


def docstring_findings(tree: ast.Module) -> Iterator[Finding]:
    """Yield docstrings of a module that open with a word that describes nothing, or in lower case."""
    for node in ast.walk(tree):
        if isinstance(node, (*FUNCTION, ast.ClassDef, ast.Module)):
            text = ast.get_docstring(node)
            line = 1 if isinstance(node, ast.Module) else node.lineno
            if text and _opens_badly(text):
                yield Finding("docstring", line, text.splitlines()[0])
        if isinstance(node, (ast.ClassDef, ast.Module)):
            for before, after in itertools.pairwise(node.body):
                comment = _constant_text(after) if isinstance(before, (ast.Assign, ast.AnnAssign)) else ""
                if _opens_badly(comment):
                    yield Finding("docstring", after.lineno, comment.splitlines()[0])


def _constant_text(node: ast.stmt) -> str:
    """Return the text of a statement that is a string alone, or an empty one."""
    value = node.value if isinstance(node, ast.Expr) else None
    return value.value.strip() if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def _opens_badly(text: str) -> bool:
    return has_bad_opening(text) or text[:1].islower()


def has_bad_opening(text: str) -> bool:
    """Return True if the first word of a docstring describes nothing."""
    word = re.match(r"[A-Za-z]+", text)
    return word is not None and word.group().lower() in BAD_OPENINGS


if __name__ == "__main__":
    main()
