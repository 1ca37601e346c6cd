"""``megatron-dppo diagnose RUN`` on real runs with known mismatches, and a run whose engine has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.forked import train_forked
from tests.e2e.runs import environment, flags, step_records, train

pytestmark = pytest.mark.e2e

ALL = flags(
    rollout__perturbation__router_noise=0.5,
    rollout__perturbation__unrecorded_top_p=0.8,
    rollout__temperature=0.7,
    train__max_staleness=1,
    optimizer__lr=1e-3,
)


def diagnosed(folder: Path, *overrides: str, processes: int = 1) -> dict[str, Any]:
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file() and file.name[0] != "."}
    target = folder.with_name("ledger.json")
    target.unlink(missing_ok=True)
    arguments = ["diagnose", str(folder), "--json", str(target), *overrides]
    done = train_forked(arguments, environment(), processes, timeout=420, entry="main")
    assert done.returncode == 0, done.stdout + done.stderr
    after = {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file() and file.name[0] != "."}
    assert before == after, "nothing of the run is written"
    actual: dict[str, Any] = json.loads(target.read_text())
    assert f"mismatch of {actual['tokens']} tokens" in done.stdout and "closes: yes" in done.stdout
    parts = [row["part"] for row in actual["causes"].values()]
    assert sum(parts) == pytest.approx(actual["mean_abs"], rel=1e-4, abs=1e-9)
    return actual


def test_the_parts_of_a_run_with_every_mismatch_close_on_two_ranks(short_run: list[str], tmp_path: Path) -> None:
    ranks = flags(parallel__expert_model_parallel_size=2)
    result = train([*short_run, *ALL, *ranks], processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    actual = diagnosed(tmp_path / "run", processes=2)
    size = {cause: row["mean_abs" if "mean_abs" in row else "size"] for cause, row in actual["causes"].items()}
    assert actual["closes"] is True and size["unexplained"] < 1e-2 * actual["mean_abs"]
    for cause in ("staleness", "sampler", "router ids", "router weights"):
        assert size[cause] > 1e-3, f"{cause} is there on purpose: {size}"
    assert size["engine numerics"] > 1e-4, f"bf16 samples; fp32 has 2e-6: {size}"


@pytest.mark.long
def test_without_a_mismatch_there_is_rounding_and_one_dose_is_told_from_the_others(
    short_run: list[str], tmp_path: Path
) -> None:
    result = train([*short_run, *flags(rollout__dtype="fp32")])
    assert result.returncode == 0, result.stdout + result.stderr
    none = diagnosed(tmp_path / "run")
    assert none["mean_abs"] < 2e-6 and none["closes"] is True
    noisy = diagnosed(tmp_path / "run", "--rollout.perturbation.router_noise", "0.5")
    shares = {cause: row["share"] for cause, row in noisy["causes"].items()}
    assert noisy["mean_abs"] > 1e-3 and shares["router ids"] + shares["router weights"] == pytest.approx(1, abs=1e-3)
    replayed = diagnosed(
        tmp_path / "run",
        *flags(
            rollout__perturbation__router_noise=0.5, train__router_replay="rollout", train__router_replay_weights="true"
        ),
    )
    assert replayed["mean_abs"] < 2e-6, "what is replayed is no mismatch"
    assert replayed["not_separated"]["router ids"] == "replayed in training"


@pytest.mark.long
@pytest.mark.parametrize("layout", ["tensor", "expert"])
def test_a_batch_invariant_run_has_no_mismatch_at_all(short_run: list[str], tmp_path: Path, layout: str) -> None:
    more = flags(
        rollout__dtype="fp32",
        rollout__batch_invariant="true",
        rollout__prompts_per_step=2,
        rollout__max_new_tokens=16,
        train__mini_batches=1,
        eval__max_prompts=3,  # an odd number: the ranks of the expert layout answer two and one
        **{f"parallel__{layout}_model_parallel_size": 2},
    )
    result = train([*short_run, *more], processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    steps = step_records(tmp_path / "run")
    assert len(steps) == 2 and [step["train/abs_prob_diff"] for step in steps] == [0.0, 0.0]
