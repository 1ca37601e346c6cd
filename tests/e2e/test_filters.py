"""Runs whose rollouts are sampled under top-p, top-k and min-p: training's distributions are those, exactly.

As in ``test_losses``, engine and trainer have the same weights at the update, so that what is left is rounding. A
trainer that ignored the cut would be off by the mass that the filters took: some percent of every probability.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.runs import flags, from_base, kill_when_exists, records, step_records, train
from tests.e2e.test_losses import SAME_WEIGHTS
from tests.e2e.test_resume import assert_same_run

pytestmark = pytest.mark.e2e

FILTERS = flags(rollout__temperature=1.3, rollout__top_p=0.9, rollout__top_k=20, rollout__min_p=0.02)
TOPK_LOSS = flags(loss__name="dppo_topk_kl", loss__topk=8)


@pytest.mark.parametrize("parallel", [pytest.param("context", marks=pytest.mark.long), "tensor"])
def test_on_policy_the_mean_ratio_is_one(short_run: list[str], tmp_path: Path, parallel: str) -> None:
    more = flags(**{f"parallel__{parallel}_{'model_' * (parallel == 'tensor')}parallel_size": 2})
    result = train([*short_run, *SAME_WEIGHTS, *FILTERS, *TOPK_LOSS, *more], processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    steps = step_records(tmp_path / "run")
    assert len(steps) == 2
    for step in steps:
        assert abs(step["train/ratio"] - 1) <= 1e-6 and step["train/ratio_max"] < 1 + 1e-5
        assert step["train/divergence_max"] < 1e-5 and step["train/abs_prob_diff"] < 1e-6
        assert abs(step["train/topk_other"] - step["train/topk_other_rollout"]) < 1e-6
        assert 1 < step["rollout/allowed_ids"] < 20, "the filters cut, and left a choice"


@pytest.mark.long
def test_killed_with_partial_rollouts_in_the_checkpoint_and_resumed_equals_uninterrupted(
    base_model: Path, tmp_path: Path
) -> None:
    arguments = from_base(
        base_model,
        run__num_steps=4,
        rollout__prompts_per_step=4,
        rollout__samples_per_prompt=4,
        rollout__oversample=1.5,
        rollout__abort_slowest="true",
        rollout__partial_rollouts=2,
        train__max_staleness=1,
        eval__max_prompts=4,
        checkpoint__save_every=1,
        log__tensorboard="false",
    )
    arguments += [*FILTERS, *TOPK_LOSS]
    whole = train([*arguments, *flags(run__output_dir=tmp_path / "whole")], processes=2)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    arguments += flags(run__output_dir=tmp_path / "run")
    kill_when_exists(tmp_path / "run/checkpoints/step_000003.partial", arguments)
    saved = [b"counts" in load_file(p)["tree"].numpy().tobytes() for p in tmp_path.glob("run/*/step_000002/rollouts_*")]
    assert saved and any(saved), "the checkpoint holds no sampling mask: this test would prove nothing"
    result = train(arguments, processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "(step 2, " in result.stdout and "sampled again" not in result.stdout
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert all(record["train/divergence_max"] > 0 for record in records(tmp_path / "run")[1:])
