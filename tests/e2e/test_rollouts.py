"""``log.rollouts_every`` on real runs: the files agree with what the losses reported, on layouts and after a resume."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest

from tests.e2e.recorded import check_agreement, rows_of
from tests.e2e.runs import flags, train
from tests.reference_run import assert_trains

pytestmark = pytest.mark.e2e

# A learning rate at which tokens leave the trust region from the second update of a step on.
RECORDED = flags(log__rollouts_every=1, train__mini_batches=2, optimizer__lr=3e-3, log__curves="false")


@pytest.mark.parametrize(
    "layout",
    [
        flags(parallel__expert_model_parallel_size=2, train__micro_batch_tokens=256),
        pytest.param(flags(parallel__tensor_model_parallel_size=2), marks=pytest.mark.long),
        pytest.param(flags(parallel__context_parallel_size=2), marks=pytest.mark.long),
        pytest.param(flags(parallel__pipeline_model_parallel_size=2), marks=pytest.mark.long),
        pytest.param(flags(parallel__context_parallel_size=2, loss__name="gspo"), marks=pytest.mark.long),
    ],
    ids=["data", "tensor", "context", "pipeline", "context, by sequence"],
)
def test_the_files_say_what_the_losses_said(short_run: list[str], tmp_path: Path, layout: list[str]) -> None:
    result = train([*short_run, *RECORDED, *layout], processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    check_agreement(tmp_path / "run", samples=16)


def test_a_resumed_run_writes_later_steps_again_and_no_step_twice(short_run: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    long = [*short_run, *RECORDED, *flags(run__num_steps=3, checkpoint__save_every=2)]
    assert train(long).returncode == 0
    assert_trains(folder)
    before = [rows_of(folder, step) for step in (1, 2, 3)]
    (folder / "rollouts/step_000009.parquet").write_bytes(b"of a start that was cut off later")
    (folder / "checkpoints/step_000003").rename(folder / "checkpoints/kept_aside")
    result = train(long)
    assert result.returncode == 0, result.stdout + result.stderr
    check_agreement(folder, samples=16)
    for step, was in zip((1, 2, 3), before, strict=True):
        now = rows_of(folder, step)
        assert now.to_json() == was.to_json(), f"step {step}, bit for bit"
    loaded = datasets.load_dataset(
        "parquet", data_files=str(folder / "rollouts/*.parquet"), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert len(loaded) == 48 and loaded[0]["response_ids"] == before[0].response_ids[0].tolist()
