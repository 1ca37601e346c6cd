"""Metrics that the losses report."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.losses import policy_loss
from tests.unit.loss_inputs import NAMES, loss_config, make_inputs, value


def test_metrics_are_those_of_a_hand_calculation() -> None:
    inputs, _ = make_inputs(
        *([0.9, 0.1, 0.5, 0.4], [0.6, 0.5, 0.5, 0.2], [1.0, -1.0, 0.0, -1.0]),
        entropy=torch.tensor([1.0, 2.0, 3.0, 4.0]),
        recomputed_logprobs=torch.tensor([0.7, 0.5, 0.5, 0.2], dtype=torch.float64).log(),
    )
    output = policy_loss(inputs, LossConfig(ratio_cap=1.9))
    want = {
        "mask_fraction": 2 / 3,
        "mask_fraction_positive": 1.0,
        "mask_fraction_negative": 1 / 2,
        "divergence": 0.9 / 4,
        "divergence_max": 0.4,
        "abs_prob_diff": 0.9 / 4,
        "prob_rise_max": 0.3,
        "prob_drop_max": 0.4,
        "ratio": (1.5 + 0.2 + 1.0 + 2.0) / 4,
        "ratio_max": 2.0,
        "ratio_capped_fraction": 1 / 4,
        "kl_k3": sum(r - 1 - math.log(r) for r in (1.5, 0.2, 1.0, 2.0)) / 4,
        "entropy": 2.5,
        "recomputed_abs_prob_diff": 0.1 / 4,
        "loss": 1.9 * math.log(0.4) / 4,
    }
    assert set(output.metrics) == set(want)
    for name, expected in want.items():
        assert value(output, name) == pytest.approx(expected, rel=1e-9), name
    assert {n for n, m in output.metrics.items() if m.kind == "max"} == {n for n in want if n.endswith("_max")}
    for metric in output.metrics.values():
        assert not torch.as_tensor(metric.numerator).requires_grad


@pytest.mark.parametrize("name", NAMES)
def test_metric_names_do_not_depend_on_the_values(name: str) -> None:
    config = loss_config(name)
    some, _ = make_inputs([0.5], [0.1], [1.0])
    none, _ = make_inputs([0.5], [0.1], [0.0], [False])
    assert policy_loss(some, config).metrics.keys() == policy_loss(none, config).metrics.keys()


def test_topk_metrics_are_the_masses_of_other_and_the_share_of_tokens_outside() -> None:
    # mu = (.1, .675, .225) and (.8, .15, .05) with K = 2: the sampled first token is outside, then inside.
    inputs, _ = make_inputs([0.2, 0.6, 0.3], [0.1, 0.8, 0.3], [1.0, 1.0, 1.0], [True, True, False])
    output = policy_loss(inputs, loss_config("dppo_topk_tv"))
    assert value(output, "topk_sampled_outside") == 0.5
    assert value(output, "topk_other_rollout") == pytest.approx((0.0 + 0.05) / 2)
    assert value(output, "topk_other") == pytest.approx((0.0 + 0.1) / 2)


def test_kl_penalty_is_reported_per_token_without_its_coefficient() -> None:
    inputs, _ = make_inputs([0.5, 0.25], [0.5, 0.5], [0.0, 0.0])
    output = policy_loss(inputs, LossConfig(kl_coef=3.0, kl_target="rollout", kl_estimator="k1"))
    assert value(output, "kl_penalty") == pytest.approx(-math.log(2) / 2)
    assert value(output, "loss") == pytest.approx(-3 * math.log(2) / 2)
