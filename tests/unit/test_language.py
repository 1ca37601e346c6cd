"""Names and docstrings of the package use the field's words."""

from __future__ import annotations

from pathlib import Path

import pytest

from measure_language import findings, is_banned
from source_folders import PACKAGES, TRAINER

FOLDERS = [*sorted(path for path in TRAINER.iterdir() if path.is_dir()), *PACKAGES.values()]


@pytest.mark.parametrize("folder", [TRAINER, *FOLDERS], ids=lambda folder: folder.name)
def test_names_docstrings_and_assignments_follow_the_rules(folder: Path) -> None:
    files = folder.glob("*.py") if folder == TRAINER else folder.rglob("*.py")
    problems = [f"{file}:{each.line}: {each.text}" for file in files for each in findings(file.read_text())]
    assert not problems


@pytest.mark.parametrize("name", ["found", "_own_loss", "ServersTold", "kept_ids", "of_rank", "settings_of", "Away"])
def test_banned_names_are_recognised(name: str) -> None:
    assert is_banned(name, is_function=True)


@pytest.mark.parametrize("name", ["placement", "in_place", "background", "rollout_logprobs", "softmax_offset"])
def test_ordinary_names_pass(name: str) -> None:
    assert not is_banned(name, is_function=True)
