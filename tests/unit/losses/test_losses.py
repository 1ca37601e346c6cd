"""The losses against float64 worked cases, finite differences, and everything that may stand outside the loss mask."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.losses import (
    policy_loss,
    supervised_loss,
)
from megatron_dppo.losses.dppo import dppo_loss
from megatron_dppo.types import LossInputs
from tests.unit.loss_inputs import NAMES, TOPK, loss_config, make_inputs, value

DATA = json.loads((Path(__file__).parents[2] / "data" / "dppo_cases.json").read_text())
NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("seed", range(3))
def test_grpo_gradient_is_that_of_the_clipped_surrogate(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_mu = torch.rand(200, generator=generator, dtype=torch.float64).log()
    start = log_mu + 0.5 * torch.randn(200, generator=generator, dtype=torch.float64)
    advantages = torch.randn(200, generator=generator, dtype=torch.float64)
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    inputs = LossInputs(
        logprobs=ours, advantages=advantages, loss_mask=torch.ones(200, dtype=torch.bool), rollout_logprobs=log_mu
    )
    policy_loss(inputs, LossConfig(name="grpo")).loss_sum.backward()
    ratio = (theirs - log_mu).exp()
    torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28)).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)


OTHER_WEIGHTS = {"gspo", "gmpo", "drpo", "spo"}
"""Their weight is not the ratio of the token: ``test_baselines`` and ``test_published_forms``."""


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in OTHER_WEIGHTS and "ratio" in LossConfig(name=name).forms]
)
def test_gradient_is_the_finite_difference_of_the_loss_with_frozen_weight_and_mask(name: str) -> None:
    # The mask and the weight are constants of the gradient, so the ratio form -A r M, with M frozen, must have the
    # same derivative as long as there is no cap.
    pi, mu, advantages = [0.3, 0.6, 0.2, 0.9], [0.25, 0.7, 0.8, 0.5], [1.0, -0.5, 2.0, -1.5]
    inputs, logprobs = make_inputs(pi, mu, advantages)
    output = policy_loss(inputs, loss_config(name))
    output.loss_sum.backward()
    step = 1e-6

    def surrogate(log_pi: Tensor) -> Tensor:
        return torch.where(output.keep_mask, -inputs.advantages * (log_pi - inputs.rollout_logprobs).exp(), 0.0).sum()

    for t in range(4):
        shift = torch.zeros(4, dtype=torch.float64)
        shift[t] = step
        slope = (surrogate(logprobs.detach() + shift) - surrogate(logprobs.detach() - shift)) / (2 * step)
        assert float(logprobs.grad[t]) == pytest.approx(float(slope), rel=1e-7, abs=1e-9)


FLOAT_FIELDS = (
    *("logprobs", "advantages", "rollout_logprobs", "recomputed_logprobs", "token_weights"),
    *("topk_logprobs", "rollout_topk_logprobs", "topk_other_logprob", "reference_logprobs"),
)


def masked_fill_rows(values: Tensor, rows: Tensor, junk: float) -> Tensor:
    filled = values.clone()
    filled[rows] = junk
    return filled


@pytest.mark.parametrize("junk", [NAN, INF, -INF])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_outside_the_loss_mask_contribute_exactly_zero(name: str, junk: float) -> None:
    config = loss_config(name, kl_coef=0.1)
    mask = [True, False, True, False]
    reference = torch.full((4,), -1.0, dtype=torch.float64)
    clean, clean_logprobs = make_inputs(
        *([0.3, 0.5, 0.2, 0.5], [0.2, 0.5, 0.9, 0.5], [1.0, 0.0, -1.0, 0.0], mask), reference_logprobs=reference
    )
    dirty = dataclasses.replace(
        clean,
        entropy=torch.full((4,), junk).masked_fill(clean.loss_mask, 0.7),
        **{field: masked_fill_rows(getattr(clean, field).detach(), ~clean.loss_mask, junk) for field in FLOAT_FIELDS},
        topk_valid=clean.topk_valid | ~clean.loss_mask[:, None],
    )
    dirty.logprobs.requires_grad_()
    dirty.topk_logprobs.requires_grad_()
    want, got = policy_loss(clean, config), policy_loss(dirty, config)
    want.loss_sum.backward()
    got.loss_sum.backward()
    assert torch.equal(got.loss_sum, want.loss_sum)
    assert torch.equal(dirty.logprobs.grad, clean_logprobs.grad)
    assert dirty.logprobs.grad[~clean.loss_mask].tolist() == [0.0, 0.0]
    if name == "score_centering":
        assert torch.equal(dirty.topk_logprobs.grad, clean.topk_logprobs.grad)
    assert got.keep_mask[~clean.loss_mask].tolist() == [False, False]
    assert int(got.num_tokens) == 2
    for key, metric in want.metrics.items():
        assert float(got.metrics[key].numerator) == float(metric.numerator), key
    assert value(got, "entropy") == pytest.approx(0.7)


def test_probability_zero_inside_the_mask_gives_zero_instead_of_nan() -> None:
    inputs, logprobs = make_inputs([0.0, 0.0, 0.5], [0.4, 0.05, 0.5], [1.0, -1.0, 1.0])
    output = policy_loss(inputs, LossConfig())
    output.loss_sum.backward()
    assert output.loss_sum.item() == pytest.approx(math.log(2))
    assert logprobs.grad.tolist() == [0.0, 0.0, -1.0]


def test_a_token_with_advantage_zero_has_no_gradient_whatever_its_rollout_log_probability() -> None:
    inputs, logprobs = make_inputs([0.5, 0.5], [NAN, 0.5], [0.0, 1.0])
    output = policy_loss(inputs, LossConfig())
    output.loss_sum.backward()
    assert output.loss_sum.item() == pytest.approx(math.log(2))
    assert logprobs.grad.tolist() == [0.0, -1.0]


UNKNOWN = [NAN, -INF, INF]


DRPO = LossConfig(name="drpo", divergence_threshold_low=0.05, divergence_threshold_high=0.2)


@pytest.mark.parametrize("advantage", [2.0, -0.5])
@pytest.mark.parametrize("pi", [0.01, 0.3, 0.39, 0.4, 0.41, 0.6, 0.99])
def test_drpo_has_the_gradient_of_its_quadratic_regulariser(pi: float, advantage: float) -> None:
    """-A r + abs(A) mu (r - 1)^2 / (2 delta), differentiated through r by autograd."""
    mu, delta = 0.4, 0.2 if advantage > 0 else 0.05
    inputs, logprobs = make_inputs([pi], [mu], [advantage])
    output = policy_loss(inputs, DRPO)
    output.loss_sum.backward()
    log_pi = torch.tensor(pi, dtype=torch.float64).log().requires_grad_()
    ratio = log_pi.exp() / mu
    (-advantage * ratio + abs(advantage) * mu * (ratio - 1) ** 2 / (2 * delta)).backward()
    assert output.keep_mask.tolist() == [True]
    assert float(logprobs.grad[0]) == pytest.approx(float(log_pi.grad), rel=1e-12)


def test_the_weight_of_drpo_vanishes_at_its_limit_and_pulls_back_beyond() -> None:
    inputs, logprobs = make_inputs([0.5, 0.6, 0.7, 0.35, 0.3], [0.4] * 5, [1.0, 1.0, 1.0, -1.0, -1.0])
    policy_loss(inputs, DRPO).loss_sum.backward()
    want = [-1.25 / 2, 0.0, 1.75 / 2, 0.0, -0.75]
    assert logprobs.grad.tolist() == pytest.approx(want, abs=1e-12)


def test_ipo_masks_both_directions_whatever_the_advantage() -> None:
    pi, mu = [0.71, 0.69, 0.29, 0.31, 0.5], [0.4, 0.4, 0.4, 0.4, 0.5]
    config = LossConfig(name="ipo", divergence_threshold_low=0.1, divergence_threshold_high=0.3)
    for advantage in (1.0, -1.0):
        inputs, logprobs = make_inputs(pi, mu, [advantage] * 5)
        output = policy_loss(inputs, config)
        output.loss_sum.backward()
        assert output.keep_mask.tolist() == [False, True, False, True, True]
        want = [0.0, -advantage * 0.69 / 0.4, 0.0, -advantage * 0.31 / 0.4, -advantage]
        assert logprobs.grad.tolist() == pytest.approx(want, abs=1e-12)
    assert LossConfig(name="ipo").thresholds == (0.3, 0.3)


@pytest.mark.parametrize("name", NAMES)
def test_a_token_whose_rollout_log_probability_is_not_finite_leaves_mask_and_count(name: str) -> None:
    """As if it stood outside the mask from the start: loss, gradient, count and every metric but its own."""
    reference = torch.full((6,), -1.0, dtype=torch.float64)
    columns = ([0.3, 0.9, 0.2, 0.9, 0.6, 0.9], [0.2, 0.1, 0.9, 0.1, 0.6, 0.1], [1.0, 1.0, -1.0, -1.0, 0.0, 0.5])
    known = [True, False, True, False, True, False]
    entropy = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], dtype=torch.float64, requires_grad=True)
    config = loss_config(name, kl_coef=0.1, entropy_coef=0.1)
    more = {"reference_logprobs": reference, "entropy": entropy}
    masked, masked_logprobs = make_inputs(*columns, known, **more)
    whole, logprobs = make_inputs(*columns, **more)
    mu = whole.rollout_logprobs.clone()
    mu[torch.tensor([1, 3, 5])] = torch.tensor(UNKNOWN, dtype=torch.float64)
    want, got = policy_loss(masked, config), policy_loss(dataclasses.replace(whole, rollout_logprobs=mu), config)
    gradients = [torch.autograd.grad(o.loss_sum, (x, entropy)) for o, x in ((want, masked_logprobs), (got, logprobs))]
    assert torch.equal(got.loss_sum, want.loss_sum) and int(got.num_tokens) == 3
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert torch.equal(got.keep_mask, want.keep_mask)
    assert got.metrics.keys() == want.metrics.keys()
    for key, metric in want.metrics.items():
        numbers = [(float(m.numerator), float(m.denominator)) for m in (got.metrics[key], metric)]
        assert numbers[0] == numbers[1], key


@pytest.mark.parametrize("form", ["reinforce", "ratio"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_gradient_at_the_cap_and_at_the_floor_and_next_to_them(form: str, sign: float) -> None:
    """r = 1 is exact, and so are a cap and a floor of 1."""

    def slope(log_ratio: float, **limits: float) -> float:
        logprobs = torch.tensor([-1.0 + log_ratio], dtype=torch.float64, requires_grad=True)
        inputs = LossInputs(
            logprobs=logprobs,
            advantages=torch.tensor([sign]),
            loss_mask=torch.tensor([True]),
            rollout_logprobs=torch.tensor([-1.0], dtype=torch.float64),
        )
        output = policy_loss(inputs, LossConfig(name="cispo", form=form, **limits))
        output.loss_sum.backward()
        return -sign * float(logprobs.grad)

    beyond = 1.0 if form == "reinforce" else 0.0
    small = 1e-9
    assert slope(0.0, ratio_cap=1.0) == 1.0
    assert slope(-small, ratio_cap=1.0) == pytest.approx(1.0, rel=1e-8)
    assert slope(small, ratio_cap=1.0) == beyond
    assert slope(0.0, ratio_floor=1.0) == 1.0
    assert slope(small, ratio_floor=1.0) == pytest.approx(1.0, rel=1e-8)
    assert slope(-small, ratio_floor=1.0) == beyond
    assert slope(-3.0, ratio_floor=0.5) == 0.5 * beyond


@pytest.mark.parametrize("name", ["grpo", "ppo_clip", "gspo", "minirl", "ppo_decoupled"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_ratio_exactly_at_its_bound_has_its_gradient_and_one_beyond_has_none(name: str, sign: float) -> None:
    log_ratio = torch.tensor([0.25 * sign], dtype=torch.float64)
    distance = float((log_ratio.exp() - 1).abs())  # 1 + distance and 1 - distance are exact again

    def slope(limit: float) -> float:
        logprobs = log_ratio.clone().requires_grad_()
        inputs = LossInputs(
            logprobs=logprobs,
            advantages=torch.tensor([sign]),
            loss_mask=torch.tensor([True]),
            rollout_logprobs=torch.zeros(1, dtype=torch.float64),
            recomputed_logprobs=torch.zeros(1, dtype=torch.float64),
            sequence_ids=torch.zeros(1, dtype=torch.int64),
            token_weights=torch.ones(1),
        )
        config = loss_config(name, clip_ratio_low=limit, clip_ratio_high=limit)
        policy_loss(inputs, config).loss_sum.backward()
        return -sign * float(logprobs.grad)

    assert slope(distance) == pytest.approx(math.exp(0.25 * sign), rel=1e-12)
    assert slope(distance * (1 - 1e-12)) == 0


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("name", [*NAMES, "supervised"])
def test_backward_runs_without_a_single_token_in_the_mask(name: str, tokens: int) -> None:
    logprobs = torch.zeros(tokens, requires_grad=True)
    inputs = LossInputs(
        logprobs=logprobs,
        advantages=torch.zeros(tokens),
        loss_mask=torch.zeros(tokens, dtype=torch.bool),
        rollout_logprobs=torch.zeros(tokens),
        entropy=torch.zeros(tokens),
        topk_logprobs=torch.zeros(tokens, TOPK + 1, requires_grad=True),
        rollout_topk_logprobs=torch.zeros(tokens, TOPK + 1),
        topk_valid=torch.ones(tokens, TOPK + 1, dtype=torch.bool),
        recomputed_logprobs=torch.zeros(tokens),
        sequence_ids=torch.zeros(tokens, dtype=torch.int64),
        token_weights=torch.ones(tokens),
        statistics={"largest_square": 1.0},
    )
    output = supervised_loss(inputs) if name == "supervised" else policy_loss(inputs, loss_config(name))
    output.loss_sum.backward()
    assert output.loss_sum.item() == 0
    assert int(output.num_tokens) == 0
    assert logprobs.grad.tolist() == [0.0] * tokens
    assert all(math.isfinite(float(m.numerator)) for m in output.metrics.values())


def test_masked_tokens_stay_in_the_token_count_and_the_sum_is_that_of_the_worked_batch() -> None:
    batch = DATA["batch"]
    flat = {key: [x for row in batch[key] for x in row] for key in ("pi", "mu", "mask")}
    advantages = [a for a, row in zip(batch["A"], batch["pi"], strict=True) for _ in row]
    inputs, _ = make_inputs(flat["pi"], flat["mu"], advantages)
    output = policy_loss(inputs, LossConfig())
    assert output.loss_sum.item() == pytest.approx(batch["agg"]["token-sum"], rel=1e-12)
    assert value(output, "loss") == pytest.approx(batch["agg"]["token-mean"], rel=1e-12)
    assert output.keep_mask.tolist() == [bool(m) for m in flat["mask"]]
    assert int(output.num_tokens) == 5


def test_bf16_log_probabilities_are_converted_to_fp32_before_any_arithmetic() -> None:
    logprobs = torch.tensor([-0.0305, -6.9]).bfloat16().requires_grad_()
    inputs = LossInputs(
        logprobs=logprobs,
        advantages=torch.tensor([1.0, -1.0]),
        loss_mask=torch.ones(2, dtype=torch.bool),
        rollout_logprobs=torch.tensor([-0.03, -6.8]).bfloat16(),
    )
    output = policy_loss(inputs, LossConfig())
    exact = policy_loss(dataclasses.replace(inputs, logprobs=logprobs.detach().double()), LossConfig())
    assert output.loss_sum.dtype == torch.float32
    assert output.loss_sum.item() == pytest.approx(exact.loss_sum.item(), rel=1e-6)


def test_an_extreme_ratio_stays_finite_and_visible() -> None:
    inputs = LossInputs(
        logprobs=torch.tensor([-1.0], requires_grad=True),
        advantages=torch.tensor([-1.0]),
        loss_mask=torch.tensor([True]),
        rollout_logprobs=torch.tensor([-500.0]),
    )
    output = policy_loss(inputs, LossConfig())
    assert math.isfinite(output.loss_sum.item())
    assert value(output, "ratio_max") > 1e30


@pytest.mark.parametrize("name", NAMES)
def test_missing_rollout_log_probabilities_name_the_loss_and_refuse_recomputed_ones(name: str) -> None:
    inputs, _ = make_inputs([0.5], [0.5], [1.0])
    inputs = dataclasses.replace(inputs, rollout_logprobs=None, recomputed_logprobs=inputs.logprobs.detach())
    with pytest.raises(ValueError, match=f"'{name}'.*rollout_logprobs"):
        policy_loss(inputs, loss_config(name))


def test_dppo_loss_equals_policy_loss_and_refuses_other_losses() -> None:
    inputs, _ = make_inputs([0.5, 0.2], [0.1, 0.5], [1.0, -1.0])
    with pytest.raises(ValueError, match=r"dppo_binary_kl.*dppo_binary_tv.* got 'grpo'"):
        dppo_loss(inputs, LossConfig(name="grpo"))
    config = LossConfig(name="dppo_binary_kl")
    assert torch.equal(dppo_loss(inputs, config).loss_sum, policy_loss(inputs, config).loss_sum)


@pytest.mark.parametrize("field", ["rollout_logprobs", "advantages", "loss_mask", "entropy"])
def test_a_field_with_a_wrong_shape_is_named(field: str) -> None:
    inputs, _ = make_inputs([0.5, 0.5], [0.5, 0.5], [1.0, 1.0])
    wrong = torch.ones(1, dtype=torch.bool if field == "loss_mask" else torch.float64)
    inputs = dataclasses.replace(inputs, **{field: wrong})
    for call in (lambda: policy_loss(inputs, LossConfig()), lambda: supervised_loss(inputs)):
        with pytest.raises(ValueError, match=rf"{field} has shape \(1,\).*\(2,\)"):
            call()


def test_a_float_loss_mask_is_refused() -> None:
    inputs, _ = make_inputs([0.5], [0.5], [1.0])
    with pytest.raises(ValueError, match="loss_mask must be bool"):
        policy_loss(dataclasses.replace(inputs, loss_mask=torch.ones(1)), LossConfig())


def test_supervised_loss_is_the_negative_log_likelihood_over_the_mask() -> None:
    logprobs = torch.tensor([-1.0, NAN, -0.25], requires_grad=True)
    inputs = LossInputs(
        logprobs=logprobs,
        advantages=torch.full((3,), NAN),
        loss_mask=torch.tensor([True, False, True]),
    )
    output = supervised_loss(inputs)
    output.loss_sum.backward()
    assert output.loss_sum.item() == 1.25
    assert logprobs.grad.tolist() == [-1.0, 0.0, -1.0]
    assert int(output.num_tokens) == 2
    assert value(output, "loss") == 0.625


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("target", ["reference", "rollout"])
def test_the_kl_penalty_is_to_the_policy_that_kl_target_names(target: str, estimator: str) -> None:
    """The gradient that the penalty adds: 1, log r and 1 - 1 / r by the estimator, r = pi over the target."""
    pi = torch.tensor([0.3, 0.5, 0.2], dtype=torch.float64)
    policies = {
        "reference": torch.tensor([0.1, 0.6, 0.25]).double(),
        "rollout": torch.tensor([0.4, 0.45, 0.2]).double(),
    }
    actual = []
    for coefficient in (0.0, 0.5):
        leaf = pi.log().requires_grad_()
        inputs = LossInputs(
            logprobs=leaf,
            rollout_logprobs=policies["rollout"].log(),
            reference_logprobs=policies["reference"].log(),
            advantages=torch.ones(3, dtype=torch.float64),
            loss_mask=torch.tensor([True, True, True]),
        )
        keys = {"kl_coef": coefficient, "kl_target": target, "kl_estimator": estimator} if coefficient else {}
        actual.append(torch.autograd.grad(policy_loss(inputs, LossConfig(name="pg_is", **keys)).loss_sum, leaf)[0])
    ratio = pi / policies[target]
    expected = {"k1": torch.ones_like(ratio), "k2": ratio.log(), "k3": 1 - 1 / ratio}[estimator]
    torch.testing.assert_close(actual[1] - actual[0], 0.5 * expected, rtol=1e-10, atol=1e-12)
