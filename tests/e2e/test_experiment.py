"""``megatron-dppo experiment``: two real runs, killed after the first, resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, environment
from tests.e2e.tiny_experiment import EXPERIMENT

pytestmark = pytest.mark.e2e


def started(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.e2e.tiny_experiment", str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=ROOT, env=environment(), text=True, **pipes)  # type: ignore[call-overload]


def processes_of(folder: Path) -> list[int]:
    """Processes that have a file of the folder open."""
    result = []
    for links in Path("/proc").glob("[0-9]*/fd"):
        try:
            open_files = [os.readlink(link) for link in links.iterdir()]
        except OSError:
            continue
        if any(name.startswith(str(folder)) for name in open_files):
            result.append(int(links.parent.name))
    return result


def test_a_killed_experiment_goes_on_where_it_was_and_its_rows_are_those_of_the_trainer(tmp_path: Path) -> None:
    first = started(tmp_path)
    end = time.monotonic() + 400
    while not (rows := list((tmp_path / "rows").glob("*.json"))):
        assert time.monotonic() < end and first.poll() is None, first.communicate()[0]
        time.sleep(0.05)
    first.kill()
    first.wait()
    end = time.monotonic() + 20  # the run under way ends with the command
    while left := processes_of(tmp_path):
        assert time.monotonic() < end, left
        time.sleep(0.1)
    assert len(rows) == len(list((tmp_path / "rows").glob("*.json"))) == 1
    before, bases = {r: (r.read_bytes(), r.stat().st_mtime_ns) for r in rows}, list((tmp_path / "bases").iterdir())
    made = [(base, base.stat().st_mtime_ns) for base in bases if base.is_dir()]

    output, _ = (second := started(tmp_path)).communicate(timeout=400)
    assert second.returncode == 0, output
    assert {r: (r.read_bytes(), r.stat().st_mtime_ns) for r in rows} == before
    assert [(base, base.stat().st_mtime_ns) for base, _ in made] == made and len(made) == 1
    assert list((tmp_path / "runs").iterdir()) == []

    result = [json.loads(file.read_text()) for file in (tmp_path / "rows").glob("*.json")]
    assert {row["key"] for row in result} == {run.key for run in EXPERIMENT.report(False, (3,), ())}
    for row in result:
        curves = row["curves"]
        assert len(curves["rollout/reward"]) == len(curves["train/abs_prob_diff"]) == 2 and not row["error"]
        assert row["cpu_seconds"] > 0.1 and row["settings"]["run"]["seed"] == 3
        # The policy begins as the engine's weights are: what is there before the first update is the router's noise.
        assert curves["train/abs_prob_diff_first"][0] > 1e-5  # of probabilities of 1 in 4,092
    text = (tmp_path / "tiny" / "table.md").read_text()
    assert "2 of 2 runs" in text and "too few seeds" in text and "| pg_is |" in text
    assert (tmp_path / "tiny" / "figures.png").stat().st_size > 5000
