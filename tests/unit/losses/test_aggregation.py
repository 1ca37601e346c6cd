"""Aggregations as per-token weights: right on the worked batch, for every split and packing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import get_args

import pytest
import torch

from megatron_dppo.config.loss import Aggregation, LossConfig
from megatron_dppo.losses import BatchTotals, policy_loss, sequence_weight, token_weights
from tests.unit.loss_inputs import make_inputs

BATCH = json.loads((Path(__file__).parents[2] / "data" / "dppo_cases.json").read_text())["batch"]
NAMES = {
    "token_mean": "token-mean",
    "token_sum": "token-sum",
    "token_sum_norm": "seq-mean-token-sum-norm (Stable-RL HEAD)",
    "seq_mean_token_sum": "seq-mean-token-sum",
    "seq_mean_token_mean": "seq-mean-token-mean",
    "seq_mean_token_sum_norm": "seq-mean-token-sum-norm (verl >= #5417)",
}
TOTALS = BatchTotals(num_tokens=5, num_sequences=2)


def parts(rows: list[list[int]], aggregation: str) -> tuple[float, int]:
    """Loss sum and token count over micro-batches of the given sequences; a masked token follows each sequence."""
    total, count, horizon = 0.0, 0, BATCH["horizon"]
    config = LossConfig(aggregation=aggregation, horizon=horizon if aggregation.endswith("_norm") else None)
    for row in rows:
        pi, mu, advantages, mask, ids = [], [], [], [], []
        for place, i in enumerate(row):
            pi += [*BATCH["pi"][i], 0.3]
            mu += [*BATCH["mu"][i], 0.9]
            advantages += [BATCH["A"][i]] * (len(BATCH["pi"][i]) + 1)
            mask += [True] * len(BATCH["pi"][i]) + [False]
            ids += [place] * (len(BATCH["pi"][i]) + 1)
        sequence_ids = torch.tensor(ids, dtype=torch.int64)
        inputs, _ = make_inputs(pi, mu, advantages, mask)
        weights = token_weights(inputs.loss_mask, sequence_ids, config.resolved_aggregation, TOTALS, config.horizon)
        output = policy_loss(dataclasses.replace(inputs, token_weights=weights), config)
        total += output.loss_sum.item()
        count += int(output.num_tokens)
    return total, count


@pytest.mark.parametrize("rows", [[[0, 1]], [[1, 0]], [[0], [1]]], ids=["packed", "other order", "two micro-batches"])
@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_the_sum_over_the_global_token_count_is_the_worked_aggregate(aggregation: str, rows: list[list[int]]) -> None:
    total, count = parts(rows, aggregation)
    assert count == TOTALS.num_tokens
    assert total / count == pytest.approx(BATCH["agg"][NAMES[aggregation]], rel=1e-6)


def test_weights_are_zero_in_a_sequence_without_tokens_in_the_mask() -> None:
    mask, ids = torch.tensor([True, True, False, False]), torch.tensor([0, 0, 1, 1])
    totals = BatchTotals(num_tokens=2, num_sequences=1)
    assert token_weights(mask, ids, "seq_mean_token_mean", totals).tolist() == [1.0, 1.0, 0.0, 0.0]


def test_an_aggregation_without_its_weights_or_its_horizon_is_refused() -> None:
    inputs, _ = make_inputs([0.5], [0.5], [1.0])
    bare = dataclasses.replace(inputs, token_weights=None)
    with pytest.raises(ValueError, match=r"token_weights because of loss\.aggregation"):
        policy_loss(bare, LossConfig(aggregation="token_sum"))
    with pytest.raises(ValueError, match="horizon is None"):
        sequence_weight("token_sum_norm", 3, TOTALS)
    with pytest.raises(ValueError, match="'mean' is unknown"):
        sequence_weight("mean", 3, TOTALS)  # type: ignore[arg-type]


def test_weights_scale_the_penalties_too_and_leave_the_count_alone() -> None:
    inputs, logprobs = make_inputs([0.5, 0.5], [0.25, 0.5], [0.0, 0.0])
    inputs = dataclasses.replace(inputs, token_weights=torch.tensor([3.0, 1.0]))
    output = policy_loss(inputs, LossConfig(kl_coef=1.0, kl_estimator="k1", kl_target="rollout"))
    output.loss_sum.backward()
    assert logprobs.grad.tolist() == [3.0, 1.0]
    assert int(output.num_tokens) == 2
