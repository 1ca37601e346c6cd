"""A start deletes no file of the user, for any contents of the folder and wherever the start is killed."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError
from megatron_dppo.process.lock import LOCK
from megatron_dppo.setup.run_folder import MARKER, OLD, RUN_FILES, check_output_dir, open_folder
from tests.unit.configs import config

SCHEDULER = (
    *("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "SLURM_RESTART_COUNT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
)


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SCHEDULER:
        monkeypatch.delenv(name, raising=False)


def config_in(folder: Path, *, overwrite: bool = False, **sections: dict[str, Any]) -> Config:
    return config(run={"output_dir": str(folder), "num_steps": 10, "overwrite": overwrite}, **sections)


def start(folder: Path, *, overwrite: bool = False, **sections: dict[str, Any]) -> list[str]:
    with open_folder(config_in(folder, overwrite=overwrite, **sections)) as opened:
        return opened.notes


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder and its content."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    return {str(p.relative_to(folder)): p.read_text() for p in files}


def fill_run(folder: Path, step: int = 3) -> None:
    """A folder as a run leaves it, with files of the user between its own."""
    start(folder)
    checkpoint = folder / f"checkpoints/step_{step:06d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps({"step": step, "config": {"run": {"num_steps": 10}}}))
    (folder / "hf").mkdir()
    (folder / "hf/model.safetensors").write_text("weights")
    (folder / "metrics.jsonl").write_text("{}\n")
    (folder / "config.toml").write_text("a = 1\n")
    (folder / "notes.txt").write_text("of the user")
    (folder / "data").mkdir()
    (folder / "data/train.jsonl").write_text("of the user too")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", RUN_FILES)
def test_a_folder_with_files_that_a_run_would_overwrite_is_rejected_unchanged(
    tmp_path: Path, name: str, overwrite: bool
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/main.c").write_text("int main;")
    if name.count(".") == 1 and not name.endswith(".partial"):
        (tmp_path / name).write_text("of the user")
    else:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("of the user")
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match=f"holds {name}, which a run"):
        start(tmp_path, overwrite=overwrite)
    assert tree(tmp_path) == before


def test_a_run_of_an_older_version_is_adopted_only_with_accept_unverified(tmp_path: Path) -> None:
    fill_run(tmp_path)
    (tmp_path / MARKER).unlink()
    with pytest.raises(ConfigError, match=r"checkpoint\.accept_unverified"):
        start(tmp_path)
    before = tree(tmp_path)
    start(tmp_path, checkpoint={"accept_unverified": True})
    assert tree(tmp_path).items() >= before.items()


def test_unsuitable_output_folders_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "run/hf").mkdir(parents=True)
    (tmp_path / "run/rollouts").mkdir()
    (tmp_path / "run/rollouts/train.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path / "home")
    run = tmp_path / "run"
    cases: list[tuple[Path | str, dict[str, Any], str]] = [
        ("/", {}, "choose a separate folder"),
        ("/tmp/..", {}, "choose a separate folder"),
        (tmp_path / "home", {}, "choose a separate folder"),
        (".", {}, "choose a separate folder"),
        (tmp_path / "file", {}, "is a file"),
        (tmp_path / "link", {}, "does not exist"),
        (run, {"model": {"path": str(run)}}, "must not write into its own input"),
        (run, {"model": {"path": str(run / "hf")}}, r"model\.path = .* lies in .*run/hf"),
        (run, {"data": {"train": [str(run / "rollouts/train.jsonl")]}}, r"data\.train = .* lies in .*run/rollouts"),
        (run, {"data": {"train": "x", "eval": {"a": str(run / "rollouts/train.jsonl")}}}, r"data\.eval = .* lies in"),
        (tmp_path / "file/run", {}, "Not a directory"),
    ]
    for folder, sections, message in cases:
        with pytest.raises(ConfigError, match=message):
            start(Path(folder), overwrite=True, **sections)
    assert tree(tmp_path) == {"file": "x", "run/rollouts/train.jsonl": "{}"}


def test_overwriting_moves_files_of_the_run_and_leaves_files_of_the_user(tmp_path: Path) -> None:
    fill_run(tmp_path)
    before = tree(tmp_path)
    (note,) = start(tmp_path, overwrite=True)
    (old,) = (tmp_path / OLD).iterdir()
    assert str(old) in note and "begins at step 0" in note
    assert {p.name for p in tmp_path.iterdir()} == {MARKER, OLD, "notes.txt", "data"}
    run_files = {name: text for name, text in before.items() if not name.startswith(("notes", "data"))}
    assert tree(old) == run_files
    assert (tmp_path / "notes.txt").read_text() == "of the user"
    fill_again = tmp_path / "config.toml"
    fill_again.write_text("second")
    (note,) = start(tmp_path, overwrite=True)
    assert "holds 2 run(s)" in note and len(list((tmp_path / OLD).iterdir())) == 2
    assert start(tmp_path, overwrite=True) == [], "an empty run is not moved"


def test_no_content_of_the_folder_is_lost(tmp_path: Path) -> None:
    """Random trees of names that a run writes and other names, at any depth, with links."""
    dice = random.Random(1)
    for case in range(30):
        folder = tmp_path / str(case)
        start(folder)
        names = dice.sample([*RUN_FILES, "a", "b.toml", ".hidden", "old/20200101-000000/x", "src/config.toml"], 9)
        for name in names:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            match dice.randrange(3):
                case 0:
                    path.write_text(f"{case} {name}")
                case 1:
                    path.mkdir()
                    (path / "inner").write_text(f"{case} {name} inner")
                case _:
                    path.symlink_to("/nowhere")
        before = Counter(tree(folder).values())
        links = sum(p.is_symlink() for p in folder.rglob("*"))
        for overwrite in (True, False, True):
            start(folder, overwrite=overwrite)
        lost = before - Counter(tree(folder).values())
        assert {text for text in lost if MARKER not in text and "run_id" not in text} == set(), (case, names)
        assert sum(p.is_symlink() for p in folder.rglob("*")) == links


class Killed(BaseException):
    """Stand-in for kill -9."""


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_next_start_finishes_a_move_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    expected = 0
    for point in range(100):
        folder = tmp_path / str(point)
        fill_run(folder)
        before = Counter(text for name, text in tree(folder).items() if name != MARKER)
        if kill_at(point, monkeypatch, folder):
            break
        start(folder, overwrite=overwrite)
        assert Counter(t for n, t in tree(folder).items() if not n.endswith(MARKER)) == before
        runs = list((folder / OLD).iterdir()) if (folder / OLD).exists() else []
        # Without overwrite, a move that was not recorded does not happen: the run stays where it was.
        (run_folder,) = runs or [folder]
        assert runs or not overwrite
        assert {"checkpoints", "hf", "metrics.jsonl", "config.toml"} <= {p.name for p in run_folder.iterdir()}
        expected += 1
    assert expected >= 8, "there are at least that many file operations"


def kill_at(point: int, monkeypatch: pytest.MonkeyPatch, folder: Path) -> bool:
    """Overwrite with a kill before the given rename or write. Return True if it ran to the end."""
    remaining = [point]

    def counted(original: Any) -> Any:
        def operation(self: Path, *args: Any, **kwargs: Any) -> Any:
            if remaining[0] == 0:
                raise Killed
            remaining[0] -= 1
            return original(self, *args, **kwargs)

        return operation

    with monkeypatch.context() as patch:
        for name in ("rename", "replace", "mkdir"):
            patch.setattr(Path, name, counted(getattr(Path, name)))
        try:
            start(folder, overwrite=True)
        except Killed:
            return False
    return True


def test_a_job_overwrites_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows: job of the existing run, its step of 10, job that starts now, and True if it resumes."""
    slurm, other = {"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8"}
    requeued = {**slurm, "SLURM_RESTART_COUNT": "1"}
    elastic, unnamed = {"TORCHELASTIC_RUN_ID": "a"}, {"TORCHELASTIC_RUN_ID": "none"}
    restart = {"TORCHELASTIC_RESTART_COUNT": "2"}
    rows = [
        (slurm, 3, slurm, True),
        (slurm, 3, requeued, True),
        (slurm, 10, requeued, True),
        (slurm, 10, slurm, False),  # by hand in an allocation: the last run had finished
        (slurm, 3, other, False),
        (slurm, 3, {**other, "SLURM_RESTART_COUNT": "1"}, False),  # killed before it overwrote
        (slurm, 3, {}, False),
        ({}, 3, slurm, False),
        ({}, 3, {}, False),
        (elastic, 3, {**elastic, **restart}, True),
        (elastic, 3, {"TORCHELASTIC_RUN_ID": "b"}, False),
        (unnamed, 3, {**unnamed, **restart}, True),
        (unnamed, 3, unnamed, False),
        ({**slurm, **elastic}, 3, {**requeued, "TORCHELASTIC_RUN_ID": "b"}, True),
        ({"PBS_JOBID": "1"}, 3, {"PBS_JOBID": "1"}, True),
    ]
    for number, (began, step, now, continues) in enumerate(rows):
        folder = tmp_path / str(number)
        with monkeypatch.context() as patch:
            for name, value in began.items():
                patch.setenv(name, value)
            fill_run(folder, step)
        with monkeypatch.context() as patch:
            for name, value in now.items():
                patch.setenv(name, value)
            (note,) = start(folder, overwrite=True)
        assert ("is ignored" in note) == continues, rows[number]
        assert (folder / "checkpoints").exists() == continues
        assert (folder / OLD).exists() != continues


def test_resume_never_rejects_a_folder_with_a_run(tmp_path: Path) -> None:
    fill_run(tmp_path)
    with pytest.raises(ConfigError, match="already holds a run"):
        start(tmp_path, checkpoint={"resume": "never"})
    start(tmp_path, overwrite=True, checkpoint={"resume": "never"})


def test_a_damaged_marker_is_an_error_that_releases_the_lock(tmp_path: Path) -> None:
    fill_run(tmp_path)
    for text in ("", "{}", "[1]", '{"run_id": 1, "x": 2}'):
        (tmp_path / MARKER).write_text(text)
        with pytest.raises(ConfigError, match="is damaged"):
            start(tmp_path, overwrite=True)
    assert not (tmp_path / LOCK).exists()


def test_a_folder_without_permission_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigError, match=r"run\.output_dir.*Permission denied"):
        start(tmp_path)


def test_checking_the_output_folder_creates_nothing(tmp_path: Path) -> None:
    check_output_dir(config_in(tmp_path / "new" / "run", overwrite=True))
    assert not list(tmp_path.iterdir())
