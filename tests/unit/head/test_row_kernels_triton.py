"""The Triton kernels: right in the interpreter, and compiled for the H100 and H200 without spilling.

Both run in a process of their own (interpret_row_kernels.py says why).
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.interpret_row_kernels import CASES

HAS_WHEEL = platform.system() == "Linux" and platform.machine() == "x86_64"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not HAS_WHEEL and importlib.util.find_spec("triton") is None,
        reason=f"the extra dev brings Triton on Linux x86_64, this is {platform.system()} {platform.machine()}",
    ),
]
REGISTERS = 64
"""a thread, at which 8 rows share a multiprocessor"""


def lines(module: str, **variables: str) -> list[dict[str, Any]]:
    """Return the output of ``python -m module``, a line of JSON each."""
    root = Path(__file__).parents[3]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": os.pathsep.join([str(root), *filter(None, [env.get("PYTHONPATH")])])} | variables
    done = subprocess.run(
        [sys.executable, "-m", module], env=env, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    """Return the failure of each case in the interpreter; empty if it passed."""
    return {line["name"]: line["failure"] for line in lines("tests.unit.interpret_row_kernels", TRITON_INTERPRET="1")}


@pytest.mark.parametrize("name", CASES)
def test_kernels_in_the_triton_interpreter(name: str, failures: dict[str, str]) -> None:
    assert not failures[name], failures[name]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    cache_folder = str(tmp_path_factory.mktemp("triton"))
    return lines("tests.unit.compile_row_kernels", TRITON_CACHE_DIR=cache_folder)


def row_kernels(compiled: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [result for result in compiled if not result["name"].startswith("words")]


def test_the_hash_of_weights_neither_spills_nor_uses_atomics_on_any_gpu(compiled: list[dict[str, Any]]) -> None:
    results = {result["name"]: result for result in compiled if result["name"].startswith("words")}
    assert results.keys() == {"words sm_80", "words sm_90", "words sm_100"}
    for result in results.values():
        assert result["stack"] == result["local"] == result["atomics"] == 0, result
        assert result["shared"] <= 1024 and result["reg"] <= REGISTERS, result


def test_no_variant_spills_or_uses_atomics(compiled: list[dict[str, Any]]) -> None:
    assert len(row_kernels(compiled)) == 16 + 2 * 7
    for result in row_kernels(compiled):
        assert result["stack"] == result["local"] == result["atomics"] == 0, result
        assert result["shared"] <= 1024, result


def test_8_rows_share_a_multiprocessor_and_loads_are_wide_where_rows_are_even(compiled: list[dict[str, Any]]) -> None:
    for result in row_kernels(compiled):
        if result["sizes"] != "uneven rows":
            assert result["reg"] <= REGISTERS, result
            # The loop's loads: 16 entries a thread.
            assert result["wide_loads"] >= (2 if " bf16" in result["name"].split(" to ")[0] else 4), result


def test_the_gradient_reads_a_block_passes_a_barrier_and_writes_it(compiled: list[dict[str, Any]]) -> None:
    gradients = [result for result in compiled if result["name"].startswith("gradient")]
    assert [result["order"] for result in gradients] == ["lbslbs"] * len(gradients)


def test_bf16_is_rounded_to_nearest(compiled: list[dict[str, Any]]) -> None:
    for result in compiled:
        if "to bf16" in result["name"] and result["sizes"] == "even":
            assert result["conversions"] == ["cvt.rn.bf16x2.f32"], result
