"""SPO, DRPO's own form, VESPO and GMPO against the derivatives of their published objectives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.losses import BatchTotals, policy_loss, token_weights
from megatron_dppo.types import LossInputs

IDS = torch.tensor([0, 0, 0, 1, 1, 2])
MASK = torch.tensor([True, False, True, True, True, True])
SIGNS = torch.tensor([1.0, 1.0, 1.0, -0.7, -0.7, 1.3], dtype=torch.float64)
MU = torch.tensor([0.4, 0.3, 0.01, 0.6, 0.05, 0.2], dtype=torch.float64)
PI = torch.tensor([0.55, 0.9, 0.03, 0.3, 0.04, 0.19], dtype=torch.float64)
HORIZON = 10
Objective = Callable[[Tensor], Tensor]
"""Log pi of all tokens -> the aggregated loss."""


def sequences() -> list[Tensor]:
    return [(IDS.eq(i) & MASK).nonzero()[:, 0] for i in range(3)]


def spo(log_pi: Tensor) -> Tensor:
    r = log_pi.exp() / MU
    return ((SIGNS.abs() * (r - 1) ** 2 / (2 * 0.3) - SIGNS * r)[MASK]).mean()


def drpo_paper(log_pi: Tensor) -> Tensor:
    r = log_pi.exp() / MU
    token = SIGNS.abs() * MU * (r - 1) ** 2 / (2 * 12.5) - SIGNS * r
    return sum(token[one].sum() / HORIZON for one in sequences()) / 3  # type: ignore[return-value]


def drpo_sides(log_pi: Tensor) -> Tensor:
    r = log_pi.exp() / MU
    delta = torch.where(SIGNS > 0, 0.5, 2.0)
    return ((SIGNS.abs() * MU * (r - 1) ** 2 / (2 * delta) - SIGNS * r)[MASK]).mean()


def vespo(log_pi: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for one in sequences():
        s = float((log_pi[one].exp() / MU[one]).prod())
        k, decay = (2.0, 3.0) if SIGNS[one[0]] > 0 else (3.0, 2.0)
        phi = s**k * torch.tensor(decay * (1 - s)).exp()
        total = total - phi * SIGNS[one[0]] * log_pi[one].sum()
    return total / int(MASK.sum())


def gmpo(log_pi: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for one in sequences():
        advantage, moved = SIGNS[one[0]], log_pi[one] - MU[one].log()
        # The pessimistic one of l and its clipped value, by the sign of A.
        pick = torch.minimum if advantage > 0 else torch.maximum
        total = total - advantage * pick(moved, moved.clamp(-0.3, 0.4)).mean().exp()
    return total / 3


FORMS: dict[str, tuple[dict[str, Any], Objective, bool]] = {
    "spo": ({"name": "spo", "ratio_range": 0.3}, spo, False),
    "spo, its value": ({"name": "spo", "ratio_range": 0.3, "form": "ratio"}, spo, True),
    "drpo, a delta for each sign": (
        {"name": "drpo", "form": "ratio", "divergence_threshold_low": 2.0, "divergence_threshold_high": 0.5},
        drpo_sides,
        True,
    ),
    "drpo/paper": ({"name": "drpo/paper", "horizon": HORIZON}, drpo_paper, True),
    "vespo": ({"name": "vespo"}, vespo, True),
    "gmpo": ({"name": "gmpo", "log_clip_low": 0.3, "log_clip_high": 0.4}, gmpo, True),
}
"""Keys, objective, and whether its value is what is reported."""


@pytest.mark.parametrize("name", FORMS)
def test_the_gradient_is_that_of_the_published_objective(name: str) -> None:
    keys, objective, has_value = FORMS[name]
    config = LossConfig(**keys)
    leaf, other = (PI.log().requires_grad_() for _ in range(2))
    totals = BatchTotals(num_tokens=int(MASK.sum()), num_sequences=3)
    inputs = LossInputs(
        logprobs=leaf,
        rollout_logprobs=MU.log(),
        advantages=SIGNS,
        loss_mask=MASK,
        sequence_ids=IDS,
        token_weights=token_weights(MASK, IDS, config.resolved_aggregation, totals, config.horizon),
    )
    loss = policy_loss(inputs, config).loss_sum / totals.num_tokens
    want = objective(other)
    loss.backward()
    want.backward()
    torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-7, atol=1e-9)  # token weights are float32
    assert other.grad is not None and int((other.grad != 0).sum()) >= 3
    if has_value:
        torch.testing.assert_close(loss, want, rtol=1e-6, atol=1e-8)


def test_presets_of_drpo_are_values_of_delta_and_the_paper_has_all_settings() -> None:
    for delta in (12.5, 2.5, 1.0, 0.15):
        config = LossConfig(name=f"drpo/{delta:g}")
        assert (config.name, config.thresholds, config.resolved_form) == ("drpo", (delta, delta), "reinforce")
    paper = LossConfig(name="drpo/paper")
    assert (paper.thresholds, paper.resolved_form, paper.horizon) == ((12.5, 12.5), "ratio", 8192)
    assert paper.resolved_aggregation == "seq_mean_token_sum_norm" and paper.ratio_limits[1] == float("inf")
    assert LossConfig(name="drpo").thresholds == (12.5, 12.5)


def test_at_the_paper_s_delta_the_weight_stays_within_8_percent_of_the_ratio() -> None:
    """Whatever pi and mu are, and at 0.15 it turns around."""
    generator = torch.Generator().manual_seed(0)
    pi, mu = torch.rand(2, 500, generator=generator, dtype=torch.float64)
    for alias, low, high in (("drpo/paper", 1 - 1 / 12.5, 1 + 1 / 12.5), ("drpo/0.15", -6.0, 8.0)):
        leaf = pi.log().requires_grad_()
        ones = torch.ones(500, dtype=torch.float64)
        inputs = LossInputs(
            logprobs=leaf, rollout_logprobs=mu.log(), advantages=ones, loss_mask=ones.bool(), token_weights=ones
        )
        policy_loss(inputs, LossConfig(name=alias)).loss_sum.backward()
        assert leaf.grad is not None
        weight = -leaf.grad / (pi / mu)
        assert low <= float(weight.min()) and float(weight.max()) <= high
        assert (float(weight.min()) < 0) == (alias == "drpo/0.15")


@pytest.mark.parametrize("name", ["spo", "vespo", "gmpo"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_ratios_stay_finite_in_fp32(name: str, advantage: float) -> None:
    for log_pi, log_mu in ((0.0, -70.0), (-70.0, 0.0), (-float("inf"), -1.0)):
        leaf = torch.tensor([log_pi], requires_grad=True)
        inputs = LossInputs(
            logprobs=leaf,
            rollout_logprobs=torch.tensor([log_mu]),
            advantages=torch.tensor([advantage]),
            loss_mask=torch.tensor([True]),
            sequence_ids=torch.tensor([0]),
            token_weights=torch.ones(1),
        )
        output = policy_loss(inputs, LossConfig(name=name))
        output.loss_sum.backward()
        assert leaf.grad is not None and bool(leaf.grad.isfinite()) and bool(output.loss_sum.isfinite())


def one_token(log_r: float, advantage: float, keys: dict[str, Any]) -> tuple[float, float]:
    """Value and gradient of a loss of one token with log mu = -30."""
    leaf = torch.tensor([log_r - 30], dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(
        logprobs=leaf,
        rollout_logprobs=torch.tensor([-30.0], dtype=torch.float64),
        advantages=torch.tensor([advantage], dtype=torch.float64),
        loss_mask=torch.tensor([True]),
        sequence_ids=torch.tensor([0]),
        token_weights=torch.ones(1),
    )
    output = policy_loss(inputs, LossConfig(**keys))
    output.loss_sum.backward()
    assert leaf.grad is not None
    return float(output.loss_sum.detach()), float(leaf.grad)


LOG_RATIOS = (-25.0, -19.0, -18.0, -5.0, 1.9, 2.1, 5.0, 19.0, 21.0, 25.0)
"""Both sides of each limit that a loss has."""


@pytest.mark.parametrize("advantage", [2.0, -0.5])
@pytest.mark.parametrize("log_r", LOG_RATIOS)
def test_ratios_are_limited_where_the_published_code_limits_them_and_nowhere_else(
    log_r: float, advantage: float
) -> None:
    r, sign = math.exp(min(max(log_r, -20), 20)), math.copysign(1, advantage)
    value, gradient = one_token(log_r, advantage, {"name": "spo", "form": "ratio"})
    assert value == pytest.approx(abs(advantage) * (r - 1) ** 2 / 0.4 - advantage * r, rel=1e-9)
    assert gradient == pytest.approx(-advantage * r * (1 - sign * (r - 1) / 0.2), rel=1e-9)
    # A decay this small leaves the power visible up to the limit.
    power, decay = (1.5, 2e-9) if advantage > 0 else (2.5, 1e-9)
    keys = {"weight_power_high": 1.5, "weight_decay_high": 2e-9, "weight_power_low": 2.5, "weight_decay_low": 1e-9}
    log_s = min(max(log_r, math.log(1e-8)), 20)
    _, gradient = one_token(log_r, advantage, {"name": "vespo", **keys})
    assert gradient == pytest.approx(-advantage * math.exp(power * log_s + decay * (1 - math.exp(log_s))), rel=1e-9)


@pytest.mark.parametrize("name", ["gmpo", "grpo", "ppo_clip", "dppo_binary_tv", "m2po", "gspo"])
def test_a_token_without_advantage_is_kept_however_far_it_moved(name: str) -> None:
    """It has no gradient, and is no masked token of the metrics."""
    for log_r in (-25.0, 0.0, 25.0):
        inputs = LossInputs(
            logprobs=torch.tensor([log_r - 30]),
            rollout_logprobs=torch.tensor([-30.0]),
            advantages=torch.zeros(1),
            loss_mask=torch.tensor([True]),
            sequence_ids=torch.tensor([0]),
            token_weights=torch.ones(1),
            statistics={"largest_square": 0.1},
        )
        assert policy_loss(inputs, LossConfig(name=name)).keep_mask.tolist() == [True]
