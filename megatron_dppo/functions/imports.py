"""Python files that a user function's file imports, by reading them: nothing is executed."""

import ast
import sys
import sysconfig
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple


class ImportedFiles(NamedTuple):
    """Files that a Python file imports, directly or through others."""

    beside: dict[str, Path]
    """Files in the folder of the file or below, by their path relative to it."""
    elsewhere: dict[str, Path]
    """Other files that belong neither to Python nor to an installed package, by the name of their module."""


def imported_files(file: Path, root: Path) -> ImportedFiles:
    """Return the files that a Python file imports, looked up in ``root`` first.

    ``import``, ``from`` and ``import_module`` with a constant name are followed, also inside functions.
    """
    # A module of packages below the root: importing it executes theirs.
    packages = [folder / "__init__.py" for folder in file.parents if root in folder.parents]
    result = ImportedFiles({path.relative_to(root).as_posix(): path for path in packages if path.is_file()}, {})
    waiting = [file, *result.beside.values()]
    visited: set[Path] = set()
    while waiting:
        current = waiting.pop()
        visited.add(current)
        for base, name in _imports(current):
            for module, path in _resolve(name, base or root, root):
                if not path.is_relative_to(root):
                    result.elsewhere[module] = path
                elif path not in visited:
                    result.beside[path.relative_to(root).as_posix()] = path
                    waiting.append(path)
    result.beside.pop(file.relative_to(root).as_posix(), None)
    return result


def find_module(name: str) -> Path | None:
    """Return the file of a module, without importing it or its packages. None if it has no Python file."""
    locations: list[str] | None = None
    spec = None
    parts = name.split(".")
    for depth in range(len(parts)):
        try:
            spec = PathFinder.find_spec(".".join(parts[: depth + 1]), locations)
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        locations = list(spec.submodule_search_locations or [])
    is_source = spec is not None and spec.origin is not None and spec.origin.endswith(".py")
    return Path(str(spec.origin)).resolve() if spec is not None and is_source else None


def is_installed(file: Path) -> bool:
    """Return True for a file of Python or of an installed package."""
    folders = [Path(path).resolve() for path in sysconfig.get_paths().values() if path]
    is_package = bool({"site-packages", "dist-packages"} & set(file.parts))
    return is_package or any(file.is_relative_to(folder) for folder in folders if folder.name.startswith("python"))


def _imports(file: Path) -> Iterator[tuple[Path | None, str]]:
    """Yield ``(folder, dotted name)`` of each import; the folder is None for an absolute import."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return  # whatever loads the file reports it
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((None, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # "." is the folder of the file, ".." the one above.
            base = file.parents[min(node.level, len(file.parents)) - 1] if node.level else None
            start = f"{node.module}." if node.module else ""
            yield from ((base, start + alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            name = node.args[0].value
            if called in ("import_module", "__import__") and isinstance(name, str) and not name.startswith("."):
                yield None, name


def _resolve(name: str, folder: Path, root: Path) -> list[tuple[str, Path]]:
    """Return module names and files of an import. Those of Python and of installed packages are left out."""
    parts = name.split(".")
    if files := _files_below(parts, folder):
        return [(name, file) for file in files]
    if parts[0] in sys.stdlib_module_names or parts[0] == "megatron_dppo" or not parts[0].isidentifier():
        return []
    file = find_module(parts[0])
    if file is not None and is_installed(file):
        return []
    # A file may add a folder below its own to the search path.
    for start in sorted(path.parent for path in root.glob(f"*/{parts[0]}.py")):
        return [(name, each) for each in _files_below(parts, start)]
    return [] if file is None else [(parts[0], file)]


def _files_below(parts: list[str], folder: Path) -> list[Path]:
    """Return the files of a dotted name in a folder, as far as they exist. ``a.b`` also matches ``b`` of ``a.py``."""
    files: list[Path] = []
    for part in parts:
        is_usual = part.isidentifier()
        if is_usual and (folder / f"{part}.py").is_file() and not (folder / part / "__init__.py").is_file():
            return [*files, folder / f"{part}.py"]
        if part == "*" or not is_usual or not (folder / part).is_dir():
            break
        folder = folder / part
        if (folder / "__init__.py").is_file():
            files.append(folder / "__init__.py")
    return files
