"""Print figures of the package's structure: ``python tools/measure_structure.py [REVISION ...]``.

Each revision is a column; the last column is the working tree. A package is a folder of ``megatron_dppo``, or a module
of its root. Imports inside functions count; those under ``if TYPE_CHECKING`` only where a row says so. Files that
inference servers load (``*_extension``) are left out. ``packages/`` has rows of lines.
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import subprocess
import tokenize
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from source_folders import LIBRARIES, ROOT

PACKAGE = "megatron_dppo"
SECTIONS_ALLOWED = ("setup", "run", "commands", "cli")
"""Packages whose functions may take the whole configuration: ``setup`` prepares a run from it."""
_MAX_FUNCTION = 60
_REASON = "Long because "
"""Start of the sentence in a docstring that says why a long function is not split."""
_UNTYPED = "signatures between rooms with Any"
Graph = Mapping[str, set[str]]


def main() -> None:
    """Measure each revision and the working tree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revisions", nargs="*", help="commits to compare with")
    revisions = [*parser.parse_args().revisions, None]
    columns = [measure(dict(sources(revision))) | _measure_all(revision) for revision in revisions]
    print(f"| | {' | '.join(revision or 'working tree' for revision in revisions)} |")
    print("|---" * (len(columns) + 1) + "|")
    for label in columns[0]:
        print(f"| {label} | {' | '.join(str(column[label]) for column in columns)} |")


def sources(revision: str | None, folder: str = PACKAGE) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the path below the folder and the source of every module, of the working tree (None) or of a commit."""
    if revision is None:
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield file.relative_to(ROOT / folder).parts, file.read_text()
        return
    command = ["git", "-C", str(ROOT), "ls-tree", "-r", "--name-only", revision, folder]
    for name in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split():
        if name.endswith(".py"):
            show = ["git", "-C", str(ROOT), "show", f"{revision}:{name}"]
            yield Path(name).parts[1:], subprocess.run(show, capture_output=True, text=True, check=True).stdout


def _measure_all(revision: str | None) -> dict[str, str]:
    """Return the figures of trainer and packages together."""
    return {_UNTYPED: str(len(untyped_seams(read_rooms(revision))))} | lines_beside(revision)


def lines_beside(revision: str | None) -> dict[str, str]:
    """Return the lines of the libraries and of the companions of ``packages/``, without their tests."""
    counts = dict.fromkeys(("libraries", "companions"), 0)
    for parts, text in sources(revision, "packages"):
        if "src" in parts:
            counts["libraries" if parts[0] in LIBRARIES else "companions"] += text.count("\n")
    return {f"lines of {kind}": str(count) for kind, count in counts.items()}


def measure(files: Mapping[tuple[str, ...], str]) -> dict[str, str]:
    """Return label -> figure.

    Args:
        files: path below the package -> source.
    """
    texts = {_module_name(parts): text for parts, text in files.items() if not parts[-2:][0].endswith("_extension")}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    modules, packages = graphs(files)
    all_modules, all_packages = graphs(files, with_types=True)
    tops = _grouped(modules, lambda name: name.split(".")[0])
    long = [has_reason for tree in trees.values() for has_reason in long_functions(tree)]
    lines = sorted(text.count("\n") for text in texts.values())
    counts = _token_counts(texts.values())
    taking = list(_functions_with_config(trees))
    outside = [name for name in taking if name.split(".")[0] not in SECTIONS_ALLOWED]
    return {
        "packages (top level)": f"{len(packages)} ({len(tops)})",
        "floors (top level)": f"{max(floors(packages).values())} ({max(floors(tops).values())})",
        "arrows (top level)": f"{_arrows(packages)} ({_arrows(tops)})",
        "circles of packages": str(len(circles(packages))),
        "circles of modules": str(len(circles(modules))),
        "circles of packages (modules), TYPE_CHECKING too": " ".join(
            (str(len(circles(all_packages))), f"({len(circles(all_modules))})")
        ),
        "files": str(len(lines)),
        "lines": str(sum(lines)),
        "lines a file, median": f"{statistics.median(lines):.0f}",
        "lines a file, 90th percentile": str(lines[int(0.9 * len(lines))]),
        "files of at most 60 lines": str(sum(count <= 60 for count in lines)),
        "tokens a code line": f"{counts.tokens / counts.code_lines:.1f}",
        "comment lines": f"{100 * counts.comments / sum(lines):.1f} %",
        f"functions above {_MAX_FUNCTION} lines (without a reason)": f"{len(long)} ({long.count(False)})",
        "Any": str(sum(_count_any(tree) for tree in trees.values())),
        "functions that take Config": str(len(taking)),
        "of these below setup": str(len(outside)),
    }


def graphs(
    files: Mapping[tuple[str, ...], str], *, with_types: bool = False
) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Return what each module, and each package, imports of the others.

    Args:
        files: path below the package -> source.
        with_types: Also count imports under ``if TYPE_CHECKING``.
    """
    trees = {
        _module_name(parts): ast.parse(text)
        for parts, text in files.items()
        if not parts[-2:][0].endswith("_extension")
    }
    modules = {name: set(_imported(tree, trees.keys(), with_types)) - {name} for name, tree in trees.items()}
    folders = {".".join(parts[:-1]) for parts in files if len(parts) > 1}
    return modules, _grouped(modules, lambda name: _package(name, folders))


def _module_name(parts: tuple[str, ...]) -> str:
    return ".".join(parts).removesuffix(".py").removesuffix("__init__").rstrip(".")


def _package(name: str, folders: set[str]) -> str:
    if name in folders or "." not in name:
        return name
    return name.rpartition(".")[0]


def _imported(tree: ast.Module, known: Collection[str], with_types: bool) -> Iterator[str]:
    """Yield the modules of the package that a module imports when it runs."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if not with_types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        pending += ast.iter_child_nodes(node)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            base = (node.module or "").removeprefix(PACKAGE).lstrip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                imported = inner if inner in known else base
                if imported in known:
                    yield imported


def _grouped(modules: Graph, package: Callable[[str], str]) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for name, used in modules.items():
        if name:
            graph.setdefault(package(name), set()).update(package(other) for other in used if other)
    return {name: (used - {name}) & graph.keys() for name, used in graph.items()}


def _arrows(graph: Graph) -> int:
    return sum(len(used) for used in graph.values())


def circles(graph: Graph) -> list[set[str]]:
    """Return the groups of nodes that reach each other (strongly connected, more than one node)."""
    reach = {name: _reachable(graph, name) for name in graph}
    groups = {frozenset(b for b in reach[a] if a in reach[b]) for a in graph}
    return [set(group) for group in groups if len(group) > 1]


def _reachable(graph: Graph, start: str) -> set[str]:
    reached: set[str] = set()
    pending = [start]
    while pending:
        for other in graph.get(pending.pop(), ()):
            if other not in reached:
                reached.add(other)
                pending.append(other)
    return reached


def floors(graph: Graph) -> dict[str, int]:
    """Return the floor of each node, from 1: one above the highest that it imports. A circle is one node."""
    groups = circles(graph)
    merged = {name: next((min(group) for group in groups if name in group), name) for name in graph}
    simple: dict[str, set[str]] = {merged[name]: set() for name in graph}
    for name, used in graph.items():
        simple[merged[name]] |= {merged[other] for other in used} - {merged[name]}
    heights: dict[str, int] = {}

    def height(name: str) -> int:
        if name not in heights:
            heights[name] = 1 + max((height(other) for other in simple[name]), default=0)
        return heights[name]

    return {name: height(merged[name]) for name in graph}


class _Counts(NamedTuple):
    """Sums over files."""

    tokens: int
    """Tokens of code."""
    code_lines: int
    comments: int
    """Lines that are comments."""


def _token_counts(texts: Iterable[str]) -> _Counts:
    tokens = 0
    code_lines = 0
    comments = 0
    silent = {tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.COMMENT}
    for text in texts:
        documented = _docstring_lines(ast.parse(text))
        used = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
                comments += 1
            if token.type not in silent and token.start[0] not in documented:
                tokens += 1
                used.add(token.start[0])
        code_lines += len(used)
    return _Counts(tokens, code_lines, comments)


def _docstring_lines(tree: ast.Module) -> set[int]:
    strings = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )
    return {line for node in strings for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def _count_any(tree: ast.AST) -> int:
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(tree))


def long_functions(tree: ast.Module) -> Iterator[bool]:
    """Yield for each long function True if its docstring has the reason."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if (node.end_lineno or node.lineno) - node.lineno + 1 > _MAX_FUNCTION:
            yield _REASON in (ast.get_docstring(node) or "")


class Room(NamedTuple):
    """Modules of a package of the trainer, or of a package beside it."""

    name: str
    trees: list[tuple[str, ast.Module]]
    """Path and source of each module."""


def untyped_seams(rooms: Sequence[Room]) -> list[str]:
    """Return the public functions, methods and fields with ``Any`` in an annotation that another room uses.

    A function is used where its name is imported. A member is used where its class is imported, in a file that has the
    member's name behind a dot or as a keyword. Members that are reached without the name of their class are not seen.
    """
    files = [(room.name, *_used_names(tree)) for room in rooms for _, tree in room.trees]
    result = []
    for room in rooms:
        elsewhere = [(imported, members) for name, imported, members in files if name != room.name]
        for path, tree in room.trees:
            for owner, name in _untyped(tree):
                is_member = owner and name not in ("__init__", "__call__")
                top = (room.name, owner or name)
                if any(top in imported and (not is_member or name in members) for imported, members in elsewhere):
                    result.append(f"{path}: {f'{owner}.{name}' if owner else name}")
    return result


def read_rooms(revision: str | None) -> list[Room]:
    """Return the packages of the trainer and those beside it, of the working tree (None) or of a commit."""
    trees: dict[str, list[tuple[str, ast.Module]]] = {}
    for folder in (PACKAGE, "packages"):
        for parts, text in sources(revision, folder):
            inner = parts if folder == PACKAGE else parts[2:]
            if inner and "tests" not in parts[:2] and not any(part.endswith("_extension") for part in parts):
                path = "/".join((folder, *parts))
                trees.setdefault(inner[0].removesuffix(".py"), []).append((path, ast.parse(text)))
    return [Room(name, modules) for name, modules in trees.items()]


def _used_names(tree: ast.Module) -> tuple[set[tuple[str, str]], set[str]]:
    """Return what a module imports, as (room, name), and its names behind dots and of keywords."""
    imported = set()
    members = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            path = (node.module or "").removeprefix(f"{PACKAGE}.").split(".")
            imported |= {(path[0], alias.name) for alias in node.names}
        elif isinstance(node, ast.Attribute):
            members.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg:
            members.add(node.arg)
    return imported, members


def _untyped(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield owner and name of each public function ("" as owner), method and field with ``Any`` in an annotation."""
    for owner in (tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))):
        owner_name = owner.name if isinstance(owner, ast.ClassDef) else ""
        for node in owner.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = node.name
                arguments = [node.args.vararg, *node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                annotations = [*(each.annotation for each in (*arguments, node.args.kwarg) if each), node.returns]
            elif owner_name and isinstance(node, ast.AnnAssign):
                name = ast.unparse(node.target)
                annotations = [node.annotation]
            else:
                continue
            is_public = not name.startswith("_") or name in ("__init__", "__call__")
            if is_public and any(_count_any(each) for each in annotations if each is not None):
                yield owner_name, name


def _functions_with_config(trees: Mapping[str, ast.Module]) -> Iterator[str]:
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if any(a.annotation is not None and ast.unparse(a.annotation) == "Config" for a in arguments):
                    yield f"{name}.{node.name}"


if __name__ == "__main__":
    main()
