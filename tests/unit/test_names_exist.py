"""Names of the package that tests, benchmarks, tools and examples import or patch exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from source_folders import ROOT, SOURCES, TESTS

OUTSIDE = {"megatron_dppo_memory", "megatron_dppo_digest", "megatron_dppo_vllm"}
"""Modules that a server imports from ``engines/serving``."""


def used_names(path: Path) -> Iterator[tuple[str, str]]:
    """Module and name of each import from the package, and of each dotted name in a string."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("megatron_dppo"):
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            value = node.args[0].value
            if isinstance(value, str) and re.fullmatch(r"megatron_dppo\w*(\.\w+)+", value):
                module, _, name = value.rpartition(".")
                yield module, name


def exists(module: str, name: str) -> bool:
    """Return True if the module's text has the name, or its folder such a module. A class may stand between them."""
    top, *inner = module.split(".")
    path = SOURCES[top].joinpath(*inner)
    if (path / name).is_dir() or (path / f"{name}.py").is_file():
        return True
    file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    if not file.is_file():
        parent, _, outer = module.rpartition(".")
        return bool(parent) and exists(parent, outer)
    return re.search(rf"\b{name}\b", file.read_text("utf-8")) is not None


def test_names_that_are_imported_or_patched_exist() -> None:
    folders = (*TESTS, ROOT / "benchmarks", ROOT / "tools", ROOT / "examples")
    files = [path for folder in folders for path in folder.rglob("*.py")]
    names = {(path, *used) for path in files for used in used_names(path)}
    missing = [
        f"{path.relative_to(ROOT)}: {module}.{name}"
        for path, module, name in sorted(names)
        if module.split(".")[0] not in OUTSIDE and not exists(module, name)
    ]
    assert len(names) > 2000 and not missing
