"""The GPU script itself: what it prints and how it ends, rehearsed on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_dppo.config.loss_registry import loss_names
from tests.gpu.checks import Result, run_check, table

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "gpu/run_all.sh"


def run_script(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHON": sys.executable} | variables
    return subprocess.run([str(SCRIPT), *arguments], env=env, capture_output=True, text=True, check=False)


def test_rehearsal_prints_a_table_and_succeeds() -> None:
    done = run_script("--cpu-rehearsal", "--only", "losses,vocab,head,teacher")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^(losses|vocab|head|teacher): (.+?)  +(\S+)  (\S+)  ok$", done.stdout, re.MULTILINE)
    assert {group for group, *_ in rows} == {"losses", "vocab", "head", "teacher"}
    assert all(float(value) <= float(bound) for *_, value, bound in rows)
    assert f"{len(rows)} passed, 0 failed" in done.stdout
    names = {name for _, name, *_ in rows}
    assert {f"{loss} gradient" for loss in loss_names()} | {"fp32 gradient", "bf16 gradient"} <= names


def test_what_a_machine_cannot_have_is_in_the_table_and_is_no_success() -> None:
    done = run_script("--cpu-rehearsal", "--only", "waits,speed")
    assert done.returncode == 1 and "0 passed, 0 failed, 3 not run" in done.stdout, done.stdout + done.stderr
    assert re.search(r"^waits: waits for the device .*  NOT RUN: needs CUDA \(torch.*\)$", done.stdout, re.MULTILINE)
    assert re.search(
        r"^speed: memory accesses .*  NOT RUN: needs CUDA and compute-sanitizer$", done.stdout, re.MULTILINE
    )


def test_bounds_of_zero_fail_the_run_and_name_the_checks() -> None:
    done = run_script("--cpu-rehearsal", "--only", "losses", GPU_CHECKS_BOUND_SCALE="0")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"^losses: dppo_binary_tv gradient .* FAILED$", done.stdout, re.MULTILINE)
    assert re.search(r"keep mask.* ok$", done.stdout, re.MULTILINE)  # exact, so it passes even then


def test_missing_imports_are_named_with_the_way_to_bring_them(tmp_path: Path) -> None:
    hide = "import sys\nsys.modules.update(dict.fromkeys(['pydantic_core', 'annotated_types']))\n"
    (tmp_path / "sitecustomize.py").write_text(hide)
    done = run_script("--cpu-rehearsal", "--only", "losses", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("missing imports: annotated_types, pydantic_core\n")
    assert "pip download" in done.stderr and "--wheels DIR" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_device_it_says_so_and_fails() -> None:
    done = run_script()
    assert done.returncode == 3 and "no CUDA device here" in done.stderr


def test_unknown_group_and_a_wheel_folder_without_wheels_are_errors(tmp_path: Path) -> None:
    assert run_script("--only", "losses,nonsense").returncode == 2
    for arguments, message in (
        (["--wheels"], "--wheels needs a folder"),
        (["--wheels", "/nowhere"], "--wheels needs a folder"),
        (["--wheels", str(tmp_path)], "no wheels in"),
    ):
        done = run_script(*arguments)
        assert done.returncode == 2 and message in done.stderr


def test_a_value_out_of_bounds_nan_or_an_exception_fails() -> None:
    def check(device: torch.device) -> Iterator[Result]:
        yield Result("fine", 1.0, 1.0)
        yield Result("too large", 1.1, 1.0)
        yield Result("not a number", float("nan"), 1.0)
        raise RuntimeError("device lost")

    results = run_check("group", check, torch.device("cpu"))
    assert [r.passed for r in results] == [True, False, False, False]
    assert "device lost" in table(results)
    assert not run_check("empty", lambda device: [], torch.device("cpu"))[0].passed
