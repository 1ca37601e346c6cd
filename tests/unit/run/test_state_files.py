"""State files that others wrote: read as what a run writes, or refused in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.errors import CheckpointError, ConfigError
from megatron_dppo.files import read_regular_file
from megatron_dppo.mcore.checkpoint.folder import read_state
from megatron_dppo.process.marker import MARKER, read_marker
from megatron_dppo.run.conversion import read_lora_config
from megatron_dppo.run.evaluation import read_sample_responses
from megatron_dppo.setup.run_folder import move_aside
from megatron_dppo.setup.starts import read_starts


def test_only_files_are_read(tmp_path: Path) -> None:
    """A pipe without a writer would wait, a device would never end, and a huge file fills the memory."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**40)
    for name in ("pipe", "zero", "loop", "folder", "huge", "absent"):
        with pytest.raises(OSError):
            read_regular_file(tmp_path / name)
    (tmp_path / "file").write_bytes(b"1")
    (tmp_path / "link").symlink_to("file")
    assert read_regular_file(tmp_path / "link") == b"1"


@pytest.mark.parametrize(
    "moving_to", ["/tmp/elsewhere", "../..", "..", ".", "a/b", "20260101-000000/..", "x", " ", 3, None, ["a"], "2026\n"]
)
def test_a_run_moves_only_into_its_own_folder(moving_to: Any, tmp_path: Path) -> None:
    marker = {"run_id": "a", "submission": "", "created": "2026-01-01 00:00:00"}
    (tmp_path / MARKER).write_text(json.dumps(marker | {"moving_to": "20260131-120000-2"}))
    assert read_marker(tmp_path).moving_to == "20260131-120000-2"  # type: ignore[union-attr]
    (tmp_path / MARKER).write_text(json.dumps(marker | {"moving_to": moving_to}))
    with pytest.raises(ConfigError, match="moving_to = "):
        read_marker(tmp_path)


def test_a_linked_folder_of_old_runs_is_refused(tmp_path: Path) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    outside.mkdir()
    (run / "metrics.jsonl").write_text("")
    (run / "old").symlink_to(outside)
    (run / MARKER).write_text(json.dumps({"run_id": "a", "submission": "", "created": "2026-01-01 00:00:00"}))
    marker = read_marker(run)
    assert marker is not None
    with pytest.raises(ConfigError, match="is a link"):
        move_aside(run, marker)
    assert (run / "metrics.jsonl").exists() and not list(outside.iterdir())


def test_starts_of_other_types_are_no_starts(tmp_path: Path) -> None:
    good = {"cwd": "/a", "world_size": 2, "resumed_step": None, "config": {}}
    wrong = [{"cwd": 3}, {"cwd": "a\0b"}, {"world_size": 10**400}, {"world_size": True}, {"resumed_step": -1}]
    wrong += [{"resumed_step": "1"}, {"config": []}, {"config_sha256": 1}]
    lines = [json.dumps(good | each) for each in wrong] + ["[]", "3", "[" * 10_000, json.dumps(good)]
    (tmp_path / "starts.jsonl").write_text("\n".join(lines))
    assert read_starts(tmp_path) == [good]


def test_other_state_files_name_the_file(tmp_path: Path) -> None:
    good = {"step": 1, "prompt": "a", "label": "b", "response": "c", "reward": 1.0}
    for key in good:
        (tmp_path / "samples.jsonl").write_text(json.dumps(good | {key: None}) + "\n")
        assert read_sample_responses(tmp_path) == []
    for text in ("NaN", '{"step": NaN}', "[]", "{" * 9, '{"step": ' + "9" * 5000 + "}"):
        (tmp_path / "state.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"state\.json"):
            read_state(tmp_path)
    for lora in (3, {"rank": "x"}, {"rank": 10**30, "unknown": 1}, []):
        (tmp_path / "state.json").write_text(json.dumps({"config": {"lora": lora}}))
        with pytest.raises(CheckpointError, match=r"config\.lora"):
            read_lora_config(tmp_path)
