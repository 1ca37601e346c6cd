"""The tables of a rehearsal name functions of this package and of Megatron Core as strings: they must exist."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from megatron_dppo_plan.assumed_values import (
    DATA_DEPENDENT_SIZES,
    INTERMEDIATE_FILES,
    VALUE_READS,
    CallSite,
)

CALL_SITES = (*VALUE_READS, *DATA_DEPENDENT_SIZES)


def package_files(suffix: str) -> list[Path]:
    """Return the source files of the packages whose path ends with the suffix."""
    files: list[Path] = []
    for package in ("megatron_dppo", "megatron_dppo_megatron_cpu", "megatron_dppo_plan", "megatron.core"):
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.submodule_search_locations
        for folder in spec.submodule_search_locations:
            files += [file for file in Path(folder).rglob(Path(suffix).name) if str(file).endswith(suffix)]
    return files


@pytest.mark.parametrize("site", CALL_SITES, ids=lambda site: f"{site.file}:{site.function}")
def test_every_call_site_exists(site: CallSite) -> None:
    files = package_files(f"/{site.file}")
    assert len(files) == 1
    functions = [
        node.name
        for node in ast.walk(ast.parse(files[0].read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    assert site.function in functions


@pytest.mark.parametrize("suffix", [file for file in INTERMEDIATE_FILES if file.endswith(".py")])
def test_every_intermediate_file_exists(suffix: str) -> None:
    assert len(package_files(f"/{suffix}")) == 1


@pytest.mark.parametrize(("function", "name"), [("permute", "num_out_tokens"), ("unpermute", "sorted_indices")])
def test_every_local_that_a_size_is_read_from_exists(function: str, name: str) -> None:
    (file,) = package_files("/moe/moe_utils.py")
    definitions = [
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    arguments = {argument.arg for node in definitions for argument in node.args.args}
    assert name in arguments
