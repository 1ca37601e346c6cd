"""Advice about the folder of a run, followed from the state in which it is printed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.errors import ConfigError, UserError
from megatron_dppo.report.records import read_metrics
from megatron_dppo.setup.run_folder import MARKER, OLD, check_output_dir
from megatron_dppo.setup.starts import STARTS, read_starts
from tests.unit.setup.test_run_folder import config_in, fill_run, no_scheduler, start

__all__ = ["no_scheduler"]


def damage_marker(run: Path) -> None:
    fill_run(run)
    (run / MARKER).write_text("{")


def damage_marker_without_checkpoint(run: Path) -> None:
    start(run)
    (run / "config.toml").write_text("a = 1\n")
    (run / MARKER).write_text("{")


def delete_marker(run: Path) -> None:
    fill_run(run)
    (run / MARKER).unlink()


def write_foreign_files(run: Path) -> None:
    run.mkdir()
    (run / "metrics.jsonl").write_text("")


def link_old(run: Path) -> None:
    fill_run(run)
    (run / OLD).symlink_to(run.parent)


def write_file(run: Path) -> None:
    run.write_text("")


def link_to_nothing(run: Path) -> None:
    run.symlink_to(run.parent / "gone")


UNVERIFIED = {"checkpoint": {"accept_unverified": True}}
CASES: list[tuple[Callable[[Path], None], dict[str, Any], str, Callable[[Path], None] | None, dict[str, Any], str]] = [
    # state, first start, advice of its message, what is done with the folder, next start, its folder
    (
        damage_marker,
        {},
        "delete this file and set checkpoint.accept_unverified = true once",
        lambda run: (run / MARKER).unlink(),
        UNVERIFIED,
        "run",
    ),
    (damage_marker_without_checkpoint, {}, "Without a checkpoint in it use another run.output_dir", None, {}, "other"),
    (
        delete_marker,
        {},
        "To resume a run of an older version, set checkpoint.accept_unverified = true",
        None,
        UNVERIFIED,
        "run",
    ),
    (delete_marker, {}, "Choose another folder", None, {}, "other"),
    (write_foreign_files, {}, "or move these files away", lambda run: (run / "metrics.jsonl").unlink(), {}, "run"),
    (
        fill_run,
        {"checkpoint": {"resume": "never"}},
        "set run.overwrite = true to move that run aside",
        None,
        {"checkpoint": {"resume": "never"}, "overwrite": True},
        "run",
    ),
    (
        fill_run,
        {"checkpoint": {"resume": "never"}},
        "choose another run.output_dir",
        None,
        {"checkpoint": {"resume": "never"}},
        "other",
    ),
    (link_old, {"overwrite": True}, "delete the link", lambda run: (run / OLD).unlink(), {"overwrite": True}, "run"),
    (write_file, {}, "choose a folder", None, {}, "other"),
    (link_to_nothing, {}, "which does not exist", lambda run: (run.parent / "gone").mkdir(), {}, "run"),
]


@pytest.mark.parametrize(("state", "first", "advice", "act", "then", "folder"), CASES)
def test_the_advice_about_a_folder_lets_the_run_start(
    tmp_path: Path,
    state: Callable[[Path], None],
    first: dict[str, Any],
    advice: str,
    act: Callable[[Path], None] | None,
    then: dict[str, Any],
    folder: str,
) -> None:
    run = tmp_path / "run"
    state(run)
    with pytest.raises(ConfigError, match=re.escape(advice)):
        start(run, **first)
    if act is not None:
        act(run)
    start(tmp_path / folder, **then)
    check_output_dir(config_in(tmp_path / folder))


def test_what_cannot_help_is_not_advised(tmp_path: Path) -> None:
    write_foreign_files(tmp_path / "run")
    with pytest.raises(ConfigError) as error:
        start(tmp_path / "run")
    assert "accept_unverified" not in str(error.value), "there is no checkpoint"


@pytest.mark.parametrize(
    ("name", "read"), [("metrics.jsonl", read_metrics), (STARTS, lambda file: read_starts(file.parent))]
)
def test_a_record_that_is_no_file_is_moved_away(tmp_path: Path, name: str, read: Callable[[Path], Any]) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match="ove it away"):
        read(tmp_path / name)
    (tmp_path / name).rename(tmp_path / "away")
    assert read(tmp_path / name) == []
    (tmp_path / name).write_text(json.dumps({"step": 1}) + "\n")
    assert len(read(tmp_path / name)) == 1
