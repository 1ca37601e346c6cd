"""``uv run`` in a fresh clone, as README.md has it. Resolves and installs everything: left to ``make test-long``."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def test_uv_runs_the_demo_in_a_fresh_clone_with_the_pinned_versions(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    # What pip is told of places with a CPU build of torch, uv is told too.
    if "PIP_FIND_LINKS" in env:
        env["UV_FIND_LINKS"] = env["PIP_FIND_LINKS"]
    command = [sys.executable, "-m", "uv", "run", "--python", sys.executable, "megatron-dppo", "demo", "--steps", "1"]
    done = subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert (clone / "runs/demo/demo.png").is_file() and "In 1 steps" in done.stdout
    status = subprocess.check_output(["git", "status", "--porcelain"], cwd=clone, text=True)
    assert status == "", "what uv leaves would go into a commit"
    locked = {each["name"]: each.get("version") for each in tomllib.loads((clone / "uv.lock").read_text())["package"]}
    pins = dict(
        line.split(";")[0].strip().split("==")
        for line in (ROOT / "requirements/lock.txt").read_text().splitlines()
        if "==" in line and not line.startswith(("#", "megatron-core"))
    )
    for name in ("transformers", "numpy", "aiohttp", "pydantic"):
        assert locked[name] == pins[name], name
