"""A reference that nothing moves is no reference: the helper of all drills refuses each way to be one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reference_run import assert_different_folders, assert_gradient, assert_trains

GOOD: list[dict[str, Any]] = [
    {"step": 0, "eval/accuracy": 0.25},
    {"step": 1, "train/grad_norm": 0.0, "rollout/groups_without_signal": 1.0},
    {"step": 2, "train/grad_norm": 0.5, "rollout/groups_without_signal": 0.5, "eval/accuracy": 0.5},
]


def write(folder: Path, **changes: float) -> Path:
    """Write the records with some values replaced where they stand."""
    records = [{name: changes.get(name, value) for name, value in record.items()} for record in GOOD]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_a_run_that_trains_is_a_reference(tmp_path: Path) -> None:
    assert_trains(write(tmp_path))
    assert_trains(write(tmp_path, **{"eval/accuracy": 0.5}), evaluation_may_stay=True)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("train/grad_norm", 0.0, "has a gradient"),
        ("rollout/groups_without_signal", 1.0, "do rewards differ"),
        ("eval/accuracy", 0.5, "no evaluation"),
    ],
)
def test_a_run_that_nothing_moves_is_refused(name: str, value: float, words: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=words):
        assert_trains(write(tmp_path, **{name: value}))


def test_one_folder_and_gradients_of_zeros_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(AssertionError, match="compared with itself"):
        assert_different_folders(tmp_path / "link", tmp_path)
    assert_gradient([None, torch.tensor([0.0, 1e-30])])
    with pytest.raises(AssertionError, match="no gradient"):
        assert_gradient([None, torch.zeros(3)])
