"""Names and docstrings of the package use the field's words."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from measure_language import findings, is_banned  # noqa: E402

PACKAGES = sorted({".", *(path.name for path in (ROOT / "megatron_dppo").iterdir() if path.is_dir())})


@pytest.mark.parametrize("package", PACKAGES)
def test_names_docstrings_and_assignments_follow_the_rules(package: str) -> None:
    folder = ROOT / "megatron_dppo" / package
    files = folder.glob("*.py") if package == "." else folder.rglob("*.py")
    problems = [f"{file}:{each.line}: {each.text}" for file in files for each in findings(file.read_text())]
    assert not problems


@pytest.mark.parametrize("name", ["found", "_own_loss", "ServersTold", "kept_ids", "of_rank", "settings_of", "Away"])
def test_banned_names_are_recognised(name: str) -> None:
    assert is_banned(name, is_function=True)


@pytest.mark.parametrize("name", ["placement", "in_place", "background", "rollout_logprobs", "softmax_offset"])
def test_ordinary_names_pass(name: str) -> None:
    assert not is_banned(name, is_function=True)
