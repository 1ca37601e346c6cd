"""The example's base model for all runs of this folder."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

import tests.shims  # noqa: F401
from tests.e2e.runs import BASE_MODEL, from_base, train


@pytest.fixture(scope="session")
def base_model() -> Path:
    """The Hugging Face folder of the example, which ``megatron-dppo base`` made: weights, config and tokenizer."""
    return BASE_MODEL


@pytest.fixture(scope="session")
def base_run(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real two-process run: 25 steps of DPPO, from ``base_model``.

    Tests only read it. ``.ci/run`` names a folder that its suites share.
    """
    shared = os.environ.get("MEGATRON_DPPO_TEST_BASE")
    complete = sorted(Path(shared).glob("*/run/output.txt")) if shared else []
    if complete:
        return complete[0].parent
    folder = Path(tempfile.mkdtemp(dir=shared or tmp_path_factory.mktemp("base"))) / "run"
    settings = {"run__num_steps": 25, "rollout__samples_per_prompt": 8, "eval__every": 25}
    result = train(from_base(base_model, run__output_dir=folder, **settings), processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    (folder / "output.txt").write_text(result.stdout)
    return folder


@pytest.fixture
def short_run(base_model: Path, tmp_path: Path) -> list[str]:
    """Arguments of a small run from the base model, in ``tmp_path / "run"``."""
    return from_base(
        base_model,
        run__output_dir=tmp_path / "run",
        run__num_steps=2,
        rollout__prompts_per_step=4,
        rollout__samples_per_prompt=4,
        eval__max_prompts=8,
        log__tensorboard="false",
        log__curves="false",
        parallel__expert_model_parallel_size=1,
    )
