"""Distillation on the layouts: gradients of policy and teacher together equal those of one process in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.distillation import GRID, MORE, Lecture, make_all, run
from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.distributed


def hold(lectures: list[Lecture], processes: int, folder: Path) -> None:
    file = folder / "expected.pt"
    torch.save(make_all(lectures), file)
    run_distributed(run, processes, lectures, file, timeout=600.0)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_teacher_on_layouts(processes: int, tmp_path: Path) -> None:
    hold(GRID[processes], processes, tmp_path)


@pytest.mark.long
def test_a_teacher_on_four_ranks(tmp_path: Path) -> None:
    hold(GRID[4], 4, tmp_path)


@pytest.mark.long
def test_every_divergence_on_every_layout_of_two(tmp_path: Path) -> None:
    hold(MORE[2], 2, tmp_path)
