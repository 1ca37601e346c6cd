"""One rule for ``--signal``: every sbatch line of the pages is the one that ``plan`` prints for its size.

``PYTHONPATH=.:packages/plan/tests python -m test_job_lines`` writes the lines anew.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.commands.main import main
from megatron_dppo.config.io import load_config
from megatron_dppo_plan.machine import get_machine
from megatron_dppo_plan.plan import make_plan
from megatron_dppo_plan.step_time import sbatch_line
from test_plan_step import FakePool
from tests.unit.test_doc_blocks import PAGES, ROOT

SCRIPT = "launch/qwen3_moe_dppo.sh"
GPUS = 8
H100 = get_machine("h100")
MINE = "examples/qwen3_30b_a3b/dppo.toml"
"""The file that ``my.toml`` of the pages extends, with the flags of two nodes."""
MINE_FLAGS = ["--optimizer-cpu-offload", "--use-precision-aware-optimizer"]


JOB = re.compile(rf"^sbatch (?:.*\\\n)*?.*{SCRIPT} (?:.*\\\n)*.*\.toml.*$", re.M)
"""A line that starts a run by its configuration, with its continuations."""


def job_lines(page: Path) -> list[str]:
    return JOB.findall(page.read_text(encoding="utf-8"))


def parameters() -> list[Any]:
    return [
        pytest.param(line, id=f"{page.relative_to(ROOT)} {line.partition('--nodes=')[2].partition(' ')[0]}")
        for page in PAGES
        for line in job_lines(page)
    ]


def planned_updates(file: str) -> dict[int, float]:
    """Return the seconds of a step's updates by number of nodes, the last column of the README's table."""
    rows = re.findall(r"^\| (\d+) \|.*\| ([\d.]+) \|$", (ROOT / file).with_name("README.md").read_text(), re.M)
    return {int(nodes): float(seconds) for nodes, seconds in rows}


def planned_line(line: str) -> str:
    """Return the line that ``plan`` prints for the size of a page's line."""
    words = shlex.split(line.replace("\\\n", " "))
    nodes = int(next(word for word in words if word.startswith("--nodes=")).partition("=")[2])
    rest = words[words.index(SCRIPT) + 1 :]
    server_nodes = int(rest[1]) if rest[0] == "--server-nodes" else 0
    file, *overrides = rest[2:] if server_nodes else rest
    path, more = (MINE, MINE_FLAGS) if file == "my.toml" else (file, [])
    config = load_config(ROOT / path, [*overrides, *more])
    servers = server_nodes * GPUS // int(config.rollout.sglang.get("tp-size", 1)) if server_nodes else None
    with FakePool() as pool:
        plan = make_plan(config, (nodes - server_nodes) * GPUS, H100, pool, kinds=["hot"], servers=servers)
    # Only the updates need a rehearsal; the README has their planned time.
    step = replace(plan.step, updates=planned_updates(path)[nodes])
    return sbatch_line(file, overrides, step, H100)


@pytest.mark.parametrize("line", parameters())
def test_a_line_of_a_page_is_that_of_the_plan(line: str) -> None:
    assert shlex.split(line.replace("\\\n", " ")) == shlex.split(planned_line(line))


def test_all_pages_are_read() -> None:
    names = {str(page.relative_to(ROOT)) for page in PAGES if job_lines(page)}
    recipes = {f"examples/{name}/README.md" for name in ("qwen3_30b_a3b", "qwen3_5_35b_a3b", "gpt_oss_20b")}
    assert {"README.md", "docs/two_nodes.md"} | recipes <= names


def wrapped(line: str, other: str) -> str:
    """Return a line with the line break that another one has before the configuration or the script."""
    breaks = re.findall(r"\\\n\s*(\S+)", other)
    for word in breaks:
        line = line.replace(f" {word}", f" \\\n    {word}", 1)
    return line


def test_the_command_prints_the_plan_and_the_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole command, with made-up rehearsals."""
    monkeypatch.setattr("megatron_dppo_plan.rehearsal_pool.RehearsalPool", lambda jobs: FakePool())
    assert main(["plan", str(ROOT / MINE), "--world-size", "32", "--num-servers", "16"]) == 0
    printed = capsys.readouterr().out
    assert "Fits 32 x h100" in printed
    assert re.search(rf"^submit   sbatch --nodes=\d+ .*{SCRIPT} .*dppo.toml", printed, re.M)


if __name__ == "__main__":
    for written in PAGES:
        content = written.read_text(encoding="utf-8")
        for old in job_lines(written):
            content = content.replace(old, wrapped(planned_line(old), old))
        if job_lines(written):
            written.write_text(content, encoding="utf-8")
