"""A start in the folder of one that left no checkpoint: what differs is said, and the old metrics stay."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.setup.contents import read_contents
from megatron_dppo.setup.run_folder import RUN_FILES, UNSAVED, set_metrics_aside
from megatron_dppo.setup.starts import STARTS, changes_since_last_start, record_start
from tests.unit.configs import config


def start(folder: Path, write: bool = True, **sections: Any) -> list[str]:
    """Begin a run there, and return what differs from its last start."""
    settings = config(run={"output_dir": str(folder)} | sections.pop("run", {}), **sections)
    contents = read_contents(settings.model_dump(mode="json")).contents
    changes = [str(change) for change in changes_since_last_start(folder, settings, contents)]
    if write:
        record_start(folder, settings, world_size=1, layout="", resumed_step=None, changes=changes, contents=contents)
    return changes


def test_values_and_files_that_differ_from_the_last_start_are_named(tmp_path: Path) -> None:
    reward, data = tmp_path / "mine.py", tmp_path / "rows.jsonl"
    (tmp_path / "beside.py").write_text("A = 1\n")
    reward.write_text("import beside\n\n\ndef score(completion, label, **_):\n    return 0\n")
    data.write_text("{}\n")
    named: dict[str, Any] = {"reward": {"function": f"{reward}:score"}, "data": {"train": str(data)}}
    assert start(tmp_path, **named) == [] == start(tmp_path, **named)
    (tmp_path / "beside.py").write_text("A = 2\n")
    data.write_text("{}\n{}\n")
    changes = start(tmp_path, **named, rollout={"max_new_tokens": 77}, run={"num_steps": 9, "seed": 5})
    names = [change.split(" differs")[0].split(" ->")[0] for change in changes]
    assert [name.partition(":")[0] for name in names] == [
        "rollout.max_new_tokens",
        "run.num_steps",
        "run.seed",
        "data.train",
        "reward.function",
    ]
    assert names[-1] == "reward.function: the content of beside.py"
    assert json.loads((tmp_path / STARTS).read_text().splitlines()[-1])["changes"] == changes


def test_another_spelling_of_a_path_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    assert start(tmp_path / "run", data={"train": "./rows.jsonl"}) == []
    assert start(tmp_path / "run", data={"train": str(tmp_path / "rows.jsonl")}) == []


@pytest.mark.parametrize("contents", [None, {"reward.function": 3}, {"reward.function": {}}])
def test_starts_of_an_older_version_have_no_contents(tmp_path: Path, contents: Any) -> None:
    start(tmp_path)
    record = json.loads((tmp_path / STARTS).read_text())
    del record["contents"]
    (tmp_path / STARTS).write_text(json.dumps(record if contents is None else record | {"contents": contents}) + "\n")
    assert start(tmp_path, write=False) == []


def test_old_metrics_are_numbered_and_belong_to_the_run(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    set_metrics_aside(tmp_path)
    metrics.write_text("")
    set_metrics_aside(tmp_path)
    assert os.listdir(tmp_path) == ["metrics.jsonl"], "nothing to keep"
    for step in (3, 1):
        metrics.write_text(json.dumps({"step": step}) + "\n")
        set_metrics_aside(tmp_path)
        assert not metrics.exists()
    kept = sorted((tmp_path / UNSAVED).iterdir())
    assert [file.name for file in kept] == ["metrics_1.jsonl", "metrics_2.jsonl"]
    assert [json.loads(file.read_text())["step"] for file in kept] == [3, 1]
    assert UNSAVED in RUN_FILES
