"""Find tests that test nothing: ``python tools/check_tests.py [PATH ...]``; part of ``make lint``.

Each finding is printed as ``file:line: text``; the exit code is 1 if there is one.

- *Patches without a target*: an assignment to an attribute of a module or class that does not exist before, such as a
  method that has moved: nothing reads the new attribute. The same for ``setattr``, for ``monkeypatch.setattr`` and
  ``mock.patch``, also by a name in a string. The target is imported and looked at. What cannot be decided (a name that
  is computed) is passed over, unless the patch says that a missing target is no error (``raising=False``,
  ``create=True``). ``# creates: why`` at the end of the line allows one.
- *Comparisons that cannot differ*: of an expression with itself, in ``==`` and in calls such as ``torch.equal`` and
  ``assert_same_run``. A call may differ from its repetition, so that this is not one.
- *Private names of the package*: an import, an attribute of a module or class, a string or a patch that names one.
  Such a test fails when code moves, and not when it breaks. ``# reaches: why`` at the end of the line allows one.
  An instance counts where the test made it, or annotated it with its class.
- *Prose of error messages*: a ``match=`` with more than three words that are no key, value or name, also one that
  comes from ``parametrize``, where ``in str(...)`` counts like ``match=``. Tests ask for the class and the key;
  ``tests/error_texts.txt`` has the texts.
- *Parametrizations without a case* fail when pytest collects them: this checks the setting in ``pyproject.toml``.

Runs that stand still, and so equal every other, are the matter of ``tests/reference_run.py``.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from source_folders import ROOT, SOURCES, TESTS

FOLDERS = (*TESTS, ROOT / "benchmarks", ROOT / "tools")
OURS = (*SOURCES, *(folder.name for folder in FOLDERS))
CREATES = "# creates:"
REACHES = "# reaches:"
PRIVATE = re.compile(rf"({'|'.join(SOURCES)})(\.\w+)*\._(?!_|replace|asdict|fields)\w+(\.\w+)*")
"""Dotted names of the package with a private part. Methods of ``NamedTuple`` have an underscore and are public."""
MAX_WORDS = 3
"""Words of prose in ``match=``: enough to tell errors of one class and key apart."""
_KEY = re.compile(r"""'[^']*'|"[^"]*"|`[^`]*`|\{[^}]*\}|\S*[\w)\]][._/=:\[(-]+\w\S*|--\w\S*""")
"""Parts of a pattern that do not count as prose: quoted values, placeholders, dotted names, addresses, flags."""
COMPARING = frozenset({"equal", "allclose", "isclose", "array_equal", "assert_close", "assert_allclose"}) | frozenset(
    {"assert_array_equal", "assert_equal", "assert_same_run", "assert_different_folders", "array_equiv"}
)
"""Last parts of the names of functions that compare their first two arguments."""
_UNKNOWN = "?"


class Finding(NamedTuple):
    """A statement that tests nothing, or the wrong thing."""

    line: int
    text: str
    marker: str = CREATES
    """Comment that allows it."""


class Scope:
    """Names of a module or function: each with the dotted names and strings that it may stand for.

    Args:
        body: Statements of the scope.
        parameters: Arguments that a caller binds.
        outer: Scope around it.
    """

    def __init__(self, body: Sequence[ast.stmt], parameters: Sequence[ast.arg], outer: Scope | None) -> None:
        self._outer = outer
        self._values: dict[str, list[str]] = {each.arg: [_UNKNOWN] for each in parameters}
        self._types = {each.arg: each.annotation for each in parameters}
        for statement in body:
            self._bind(statement)

    def resolve(self, node: ast.expr) -> list[str]:
        """Return the dotted names that an expression may stand for; none if that cannot be decided."""
        match node:
            case ast.Name(id=name):
                values = self._values.get(name)
                if values is None:
                    return [] if self._outer is None else self._outer.resolve(node)
                return [] if _UNKNOWN in values else values
            case ast.Attribute(value=value, attr=attr):
                return [f"{base}.{attr}" for base in self.resolve(value)]
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name))]):
                return [name]
            case ast.Subscript(value=ast.Attribute(attr="modules"), slice=ast.Constant(value=str(name))):
                return [name]
        return []

    def classes(self, node: ast.expr) -> list[str]:
        """Return the dotted names of an object's class: of a call, or of an annotated or assigned name."""
        if isinstance(node, ast.Call):
            return [name for name in self.resolve(node.func) if name.rpartition(".")[2][:1].isupper()]
        if not isinstance(node, ast.Name):
            return []
        if node.id not in self._types:
            return [] if self._outer is None or node.id in self._values else self._outer.classes(node)
        made = self._types[node.id]
        return self.classes(made) if isinstance(made, ast.Call) else self.resolve(made) if made else []

    def strings(self, node: ast.expr) -> list[str]:
        """Return the strings that an expression may be; none if that cannot be decided."""
        if isinstance(node, ast.Constant):
            return [node.value] if isinstance(node.value, str) else []
        values = self._values.get(node.id) if isinstance(node, ast.Name) else None
        if values is None and isinstance(node, ast.Name) and self._outer is not None:
            return self._outer.strings(node)
        return [value[1:] for value in values or () if value.startswith("=")]

    def _bind(self, node: ast.AST) -> None:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    self._add(alias.asname or alias.name.partition(".")[0], [alias.name if alias.asname else ""])
            case ast.ImportFrom(module=str(module), names=names, level=0):
                for alias in names:
                    self._add(alias.asname or alias.name, [f"{module}.{alias.name}"])
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._types[name] = value if isinstance(value, ast.Call) and name not in self._types else None
                self._add(name, self.resolve(value) or [_UNKNOWN])
            case ast.For(target=ast.Name(id=name), iter=ast.Tuple(elts=parts) | ast.List(elts=parts)):
                self._add(name, [value for part in parts for value in self._constant(part)])
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                self._add(name, [_UNKNOWN])
                return
            case ast.Lambda():
                return
            case ast.Name(id=name, ctx=ast.Store()):
                self._add(name, [])
                if name not in self._values:
                    self._values[name] = [_UNKNOWN]
        for child in ast.iter_child_nodes(node):
            self._bind(child)

    def _constant(self, node: ast.expr) -> list[str]:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return [f"={node.value}"]
        return self.resolve(node) or [_UNKNOWN]

    def _add(self, name: str, values: list[str]) -> None:
        known = self._values.setdefault(name, []) if values else self._values.get(name, [])
        known += [value or name for value in values]


def findings(source: str) -> Iterator[Finding]:
    """Yield what a file tests wrongly."""
    lines = source.splitlines()
    tree = ast.parse(source)
    for finding in (*_walk(tree.body, Scope(tree.body, (), None)), *_check_parameters(tree)):
        if finding.marker not in lines[finding.line - 1]:
            yield finding


def _walk(body: Sequence[ast.AST], scope: Scope) -> Iterator[Finding]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            statements = node.body if isinstance(node.body, list) else [ast.Expr(node.body)]
            parameters = [each for each in ast.walk(node.args) if isinstance(each, ast.arg)]
            outside = [] if isinstance(node, ast.Lambda) else node.decorator_list
            yield from _walk(outside, scope)
            yield from _walk(statements, Scope(statements, parameters, scope))
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from _missing(node, scope.resolve(node.value), [node.attr])
        elif isinstance(node, ast.Call):
            yield from _check_patch(node, scope)
            yield from _check_call(node)
            yield from _check_match(node)
        elif isinstance(node, ast.Compare):
            yield from _check_comparison(node)
        yield from _check_private(node, scope)
        yield from _walk(list(ast.iter_child_nodes(node)), scope)


def _check_patch(node: ast.Call, scope: Scope) -> Iterator[Finding]:
    """Check the targets of ``setattr``, ``monkeypatch.setattr``, ``mock.patch`` and ``mock.patch.object``."""
    called = ast.unparse(node.func)
    is_patch = called.endswith(("patch", "patch.object"))
    if not (called == "setattr" or called.endswith(".setattr") or is_patch) or not node.args:
        return
    options = {each.arg: each.value for each in node.keywords}
    text = scope.strings(node.args[0])
    if text and all("." in each for each in text):
        owners = [each.rpartition(".")[0] for each in text]
        names = [each.rpartition(".")[2] for each in text]
        for owner, name in zip(owners, names, strict=True):
            yield from _missing(node, [owner], [name])
        return
    owners = scope.resolve(node.args[0])
    names = scope.strings(node.args[1]) if len(node.args) > 1 else []
    yield from _missing(node, owners, names)
    is_lenient = any(
        isinstance(value := options.get(key), ast.Constant) and value.value is wanted
        for key, wanted in (("raising", False), ("create", True))
    )
    if is_lenient and not (owners and names):
        yield Finding(node.lineno, f"{ast.unparse(node.args[0])}: a missing target is no error here")


def _missing(node: ast.expr, owners: Sequence[str], names: Sequence[str]) -> Iterator[Finding]:
    for dotted in (f"{owner}.{name}" for owner in owners for name in names):
        if missing := missing_part(dotted):
            yield Finding(node.lineno, f"{missing} does not exist before: nothing reads it")


def missing_part(dotted: str) -> str:
    """Return the first part of a dotted name that a module or class lacks.

    Returns:
        Empty if there is none, or if that cannot be decided: below an instance, or in a package that is not installed.
    """
    parts = dotted.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            target: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        # Modules of other packages differ between their versions; ours must exist.
        if parts[0] not in OURS and count < len(parts) - 1 and not hasattr(target, parts[count]):
            return ""
        for index in range(count, len(parts)):
            if not (inspect.ismodule(target) or inspect.isclass(target)):
                return ""
            if not has_attribute(target, parts[index]):
                return ".".join(parts[: index + 1])
            target = getattr(target, parts[index], None)
        return ""
    return dotted if parts[0] in OURS else ""


def has_attribute(target: Any, name: str) -> bool:
    """Return True if a module or class has an attribute, or declares one."""
    if inspect.isclass(target):
        return any(name in vars(each) or name in vars(each).get("__annotations__", {}) for each in target.__mro__)
    return hasattr(target, name) or name in getattr(target, "__annotations__", {})


def _check_comparison(node: ast.Compare) -> Iterator[Finding]:
    sides = [node.left, *node.comparators]
    for operator, left, right in zip(node.ops, sides, sides[1:], strict=False):
        if isinstance(operator, ast.Eq | ast.Is | ast.LtE | ast.GtE) and is_same(left, right):
            yield Finding(node.lineno, f"{ast.unparse(left)} is compared with itself")


def _check_call(node: ast.Call) -> Iterator[Finding]:
    name = ast.unparse(node.func).rpartition(".")[2]
    if name in COMPARING and len(node.args) > 1 and is_same(node.args[0], node.args[1]):
        yield Finding(node.lineno, f"{ast.unparse(node.args[0])} is compared with itself")


def _check_match(node: ast.Call) -> Iterator[Finding]:
    for pattern in (each.value for each in node.keywords if each.arg == "match"):
        yield from _check_prose(pattern)


def _check_prose(pattern: ast.expr) -> Iterator[Finding]:
    parts = pattern.values if isinstance(pattern, ast.JoinedStr) else [pattern]
    text = "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in parts)  # type: ignore[misc]
    # Of alternatives, the longest counts.
    words = max((prose(part) for part in text.split("|")), key=len)
    if len(words) > MAX_WORDS:
        yield Finding(pattern.lineno, f"{len(words)} words of prose ({' '.join(words)}): keep a key, value or name")


def _check_parameters(tree: ast.Module) -> Iterator[Finding]:
    """Find prose of errors in the lists of ``parametrize``, also in a list that has a name in the same module."""
    lists = {ast.unparse(each.targets[0]): each.value for each in tree.body if isinstance(each, ast.Assign)}
    cells = set()
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        compared = {each.id for each in _compared_with_errors(function) if isinstance(each, ast.Name)}
        for decorator in function.decorator_list:
            match decorator:
                case ast.Call(func=ast.Attribute(attr="parametrize"), args=[names, rows, *_]):
                    parameters = ast.literal_eval(names)
                    if isinstance(parameters, str):
                        parameters = parameters.replace(",", " ").split()
                    column = _text_cells(lists.get(ast.unparse(rows), rows), len(parameters))
                    cells |= {cell for index, cell in column if parameters[index] in compared}
    for cell in cells:
        yield from _check_prose(cell)


def _compared_with_errors(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the parts of ``match=``, and of what is looked for in ``str(...)``."""
    for node in ast.walk(function):
        match node:
            case ast.keyword(arg="match", value=value):
                yield from ast.walk(value)
            case ast.Compare(left=left, ops=[ast.In()], comparators=[ast.Call(func=ast.Name(id="str"))]):
                yield from ast.walk(left)


def _text_cells(rows: ast.expr, num_columns: int) -> Iterator[tuple[int, ast.expr]]:
    """Yield column and expression of each text in the rows of a list or tuple."""
    for row in rows.elts if isinstance(rows, ast.List | ast.Tuple) else ():
        cells = [row]
        if isinstance(row, ast.Call) and ast.unparse(row.func) == "pytest.param":
            cells = row.args
        elif isinstance(row, ast.Tuple) and num_columns > 1:
            cells = row.elts
        for index, cell in enumerate(cells[:num_columns]):
            if isinstance(cell, ast.JoinedStr) or (isinstance(cell, ast.Constant) and isinstance(cell.value, str)):
                yield index, cell


def prose(pattern: str) -> list[str]:
    """Return the words of a regular expression that are no part of a key, value or name."""
    text = re.sub(r"\.\*|\(\?s\)|\\[nd]", " ", pattern).replace("\\", "")
    return [word for word in re.findall(r"\b[^\W\d_]{2,}\b", _KEY.sub(" ", text)) if word.islower() or word.istitle()]


def _check_private(node: ast.AST, scope: Scope) -> Iterator[Finding]:
    """Find private names of the package's modules and classes."""
    names: list[str] = []
    match node:
        case ast.ImportFrom(module=str(module), names=aliases, level=0):
            names = [f"{module}.{alias.name}" for alias in aliases]
        case ast.Import(names=aliases):
            names = [alias.name for alias in aliases]
        case ast.Attribute(value=value, attr=attr):
            names = [f"{owner}.{attr}" for owner in (*scope.resolve(value), *scope.classes(value))]
        case ast.Constant(value=str(text)):
            names = [text]
        case ast.Call(args=[owner, name, *_]):
            names = [f"{each}.{private}" for each in scope.resolve(owner) for private in scope.strings(name)]
    for name in names:
        if PRIVATE.fullmatch(name):
            yield Finding(node.lineno, f"{name} is private: test what it does through a public name", REACHES)  # type: ignore[attr-defined]


def is_same(left: ast.expr, right: ast.expr) -> bool:
    """Return True if two expressions have the same value whatever happens: the same text, and nothing is called."""
    changing = (ast.Call, ast.Await, ast.Yield, ast.NamedExpr)
    return ast.dump(left) == ast.dump(right) and not any(isinstance(each, changing) for each in ast.walk(left))


def setting_problems(pyproject: Path) -> list[str]:
    """Return what is wrong with pytest's settings: a parametrization without a case must be an error."""
    settings = tomllib.loads(pyproject.read_text())["tool"]["pytest"]["ini_options"]
    is_set = settings.get("empty_parameter_set_mark") == "fail_at_collect"
    return [] if is_set else [f'{pyproject.name}: expected empty_parameter_set_mark = "fail_at_collect"']


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the findings of the given files and folders; 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "paths", nargs="*", type=Path, help="files or folders; default: all tests, benchmarks and tools"
    )
    paths = parser.parse_args(arguments).paths or FOLDERS
    sys.path[:0] = [str(ROOT), *(str(folder.parent) for folder in SOURCES.values())]
    files = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    problems = setting_problems(ROOT / "pyproject.toml")
    for file in files:
        problems += [f"{file}:{line}: {text}" for line, text, _ in findings(file.read_text("utf-8"))]
    print(
        "\n".join(problems)
        or f"{len(files)} files: each patch has a target, nothing is compared with itself, no private name"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
