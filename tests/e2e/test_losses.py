"""Losses that need more than the rollout's log-probabilities, in whole runs: from the engine to the optimizer.

The engine computes in fp32 here, and there is one update a step: trainer and engine then have the same weights at the
update, so every distance between them is rounding. A shift by one position, a lost temperature, a padded id in the
softmax or a wrong context-parallel order would show as a distance of the size of the probabilities.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import flags, records, train

pytestmark = pytest.mark.e2e

SAME_WEIGHTS = flags(rollout__dtype="fp32", train__mini_batches=1, train__epochs=1, rollout__temperature=0.7)


def test_topk_dppo_under_context_parallelism_sees_the_engine_s_own_distribution(
    short_run: list[str], tmp_path: Path
) -> None:
    more = flags(loss__name="dppo_topk_kl", loss__topk=8, parallel__context_parallel_size=2)
    result = train([*short_run, *SAME_WEIGHTS, *more], processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    for step in records(tmp_path / "run")[1:]:
        assert step["train/divergence_max"] < 1e-5 and step["train/abs_prob_diff"] < 1e-5
        assert abs(step["train/topk_other"] - step["train/topk_other_rollout"]) < 1e-5
        assert step["train/mask_fraction"] == 0


def test_recomputed_and_reference_logprobs_are_those_of_their_weights(short_run: list[str], tmp_path: Path) -> None:
    more = flags(
        loss__name="minirl",
        loss__kl_coef=0.1,
        loss__entropy_coef=0.01,
        loss__aggregation="seq_mean_token_mean",
        reward__kl_coef=0.5,
        train__advantage="none",
        train__advantage_normalization="batch",
        parallel__tensor_model_parallel_size=2,
    )
    result = train([*short_run, *SAME_WEIGHTS, *more], processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    first, second = records(tmp_path / "run")[1:]
    for step in (first, second):
        assert step["train/recomputed_abs_prob_diff"] < 1e-5, "pi' is the policy before the update"
    assert abs(first["train/kl_penalty"]) < 1e-7, "before the first update the policy is its own reference"
    assert second["train/kl_penalty"] > 1e-7, "after it the reference stays behind"
    assert abs(first["train/kl_in_reward"]) < 1e-6 < abs(second["train/kl_in_reward"])


@pytest.mark.long
def test_sequence_losses_train_over_balanced_data_parallel_ranks(short_run: list[str], tmp_path: Path) -> None:
    result = train([*short_run, *SAME_WEIGHTS, *flags(loss__name="gspo")], processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    assert all(step["train/abs_prob_diff"] < 1e-5 for step in records(tmp_path / "run")[1:])


def test_a_topk_above_the_vocabulary_is_refused(short_run: list[str]) -> None:
    result = train([*short_run, *flags(loss__name="dppo_topk_tv", loss__topk=54)])
    assert result.returncode == 2 and "loss.topk = 54 is above the 53 entries" in result.stdout + result.stderr
