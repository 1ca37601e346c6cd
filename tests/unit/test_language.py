"""Names and docstrings of the package use the field's words."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from measure_language import docstring_findings, findings, has_bad_opening, is_banned
from source_folders import PACKAGES, ROOT, TESTS, TRAINER

FOLDERS = [*sorted(path for path in TRAINER.iterdir() if path.is_dir()), *PACKAGES.values()]


@pytest.mark.parametrize("folder", [TRAINER, *FOLDERS], ids=lambda folder: folder.name)
def test_names_docstrings_and_assignments_follow_the_rules(folder: Path) -> None:
    files = folder.glob("*.py") if folder == TRAINER else folder.rglob("*.py")
    problems = [f"{file}:{each.line}: {each.text}" for file in files for each in findings(file.read_text())]
    assert not problems


@pytest.mark.parametrize("folder", TESTS, ids=lambda folder: folder.parent.name)
def test_docstrings_of_tests_open_with_a_verb_or_a_noun(folder: Path) -> None:
    files = [file for file in folder.rglob("*.py") if ROOT / "tests/faults" not in file.parents]
    wrong = [
        f"{file}:{each.line}: {each.text}"
        for file in files
        for each in docstring_findings(ast.parse(file.read_text()))
        if has_bad_opening(each.text)
    ]
    assert files and not wrong


@pytest.mark.parametrize("text", ["What a rank sends.", "Whether it holds", "Of one rank.", "HOW it ends", "That of x"])
def test_bad_openings_are_recognised(text: str) -> None:
    assert has_bad_opening(text)
    assert [each.text for each in findings(f'def f():\n    """{text}"""\n')] == [text]


@pytest.mark.parametrize("text", ["Return whether it holds.", "Whatever is left.", "Offsets of a row.", ""])
def test_ordinary_openings_pass(text: str) -> None:
    assert not has_bad_opening(text)


@pytest.mark.parametrize("name", ["found", "_own_loss", "ServersTold", "kept_ids", "of_rank", "settings_of", "Away"])
def test_banned_names_are_recognised(name: str) -> None:
    assert is_banned(name, is_function=True)


@pytest.mark.parametrize("name", ["placement", "in_place", "background", "rollout_logprobs", "softmax_offset"])
def test_ordinary_names_pass(name: str) -> None:
    assert not is_banned(name, is_function=True)
