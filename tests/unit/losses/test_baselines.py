"""GSPO, mismatch masks, KL penalty and entropy bonus against formulas written out here, differentiated by autograd."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.losses import BatchTotals, mismatch_keep_mask, policy_loss, token_weights
from tests.unit.loss_inputs import NAMES, loss_config, make_inputs, value

BATCH = json.loads((Path(__file__).parents[2] / "data" / "dppo_cases.json").read_text())["batch"]


@pytest.mark.parametrize("entry", BATCH["gspo"], ids=lambda e: f"{e['A']} {e['eps']}")
def test_gspo_token_loss_and_gradient_of_the_worked_batch(entry: dict[str, Any]) -> None:
    row = 0 if entry["A"] > 0 else 1
    pi, mu = BATCH["pi"][row], BATCH["mu"][row]
    low, high = entry["eps"]
    inputs, logprobs = make_inputs(pi, mu, [entry["A"]] * len(pi))
    output = policy_loss(inputs, LossConfig(name="gspo", clip_ratio_low=low, clip_ratio_high=high))
    output.loss_sum.backward()
    n = len(pi)
    assert output.loss_sum.item() == pytest.approx(n * entry["token_loss"])
    assert logprobs.grad.tolist() == pytest.approx([entry["dloss_dlogp_per_token"]] * n)
    assert output.keep_mask.tolist() == [not entry["clipped"]] * n


def test_gspo_over_two_packed_sequences_is_the_mean_of_the_sequence_objectives() -> None:
    pi, mu = ([x for row in BATCH[key] for x in row] for key in ("pi", "mu"))
    ids, mask = torch.tensor([0, 0, 0, 1, 1]), [True, False, True, True, True]
    inputs, logprobs = make_inputs(pi, mu, [1.0, 1.0, 1.0, -1.0, -1.0], mask, sequence_ids=ids)
    totals = BatchTotals(num_tokens=4, num_sequences=2)
    inputs = dataclasses.replace(
        inputs, token_weights=token_weights(inputs.loss_mask, ids, "seq_mean_token_mean", totals)
    )
    output = policy_loss(inputs, LossConfig(name="gspo", clip_ratio_low=0.9, clip_ratio_high=9.0))
    output.loss_sum.backward()

    log_pi, log_mu = logprobs.detach().clone().requires_grad_(), inputs.rollout_logprobs
    first = ((log_pi - log_mu)[[0, 2]].mean()).exp()
    second = ((log_pi - log_mu)[3:].mean()).exp()
    want = (-first + second) / 2
    want.backward()
    assert output.loss_sum.item() / 4 == pytest.approx(want.item(), rel=1e-6)
    torch.testing.assert_close(logprobs.grad / 4, log_pi.grad, rtol=1e-6, atol=1e-9)


def test_token_mismatch_masks_ratios_strictly_outside_the_limits() -> None:
    log_ratio = torch.tensor([0.49, 0.5, 1.0, 2.0, 2.01], dtype=torch.float64).log()
    keep = mismatch_keep_mask(log_ratio, torch.ones(5, dtype=torch.bool), "token", (0.5, 2.0))
    assert keep.tolist() == [False, True, True, True, False]
    assert not mismatch_keep_mask(torch.tensor([math.nan]), torch.tensor([True]), "token", (0.0, 2.0))


def test_sequence_mismatch_masks_sequences_by_product_or_geometric_mean() -> None:
    ratio = torch.tensor([1.5, 1.5, 9.0, 1.9, 0.6, 3.0], dtype=torch.float64)
    ids = torch.tensor([0, 0, 0, 1, 1, 2])
    mask = torch.tensor([True, True, False, True, True, True])
    # products 2.25, 1.14, 3; geometric means 1.5, 1.07, 3
    assert mismatch_keep_mask(ratio.log(), mask, "sequence", (0.5, 2.0), ids).tolist() == [False] * 3 + [
        True,
        True,
        False,
    ]
    assert mismatch_keep_mask(ratio.log(), mask, "geometric", (0.5, 2.0), ids).tolist() == [True] * 5 + [False]
    with pytest.raises(ValueError, match="sequence_ids is None"):
        mismatch_keep_mask(ratio.log(), mask, "sequence", (0.5, 2.0))


@pytest.mark.parametrize("mode", ["mask_token", "mask_sequence", "mask_geometric"])
@pytest.mark.parametrize("name", NAMES)
def test_a_mismatch_mask_removes_the_gradient_and_the_value_but_not_the_count(name: str, mode: str) -> None:
    # The second sequence is far off, in pi and in pi'.
    pi, mu = [0.5, 0.5, 0.9], [0.5, 0.5, 0.1]
    recomputed = torch.tensor(pi, dtype=torch.float64).log()
    inputs, logprobs = make_inputs(
        pi, mu, [1.0, -1.0, -1.0], recomputed_logprobs=recomputed, sequence_ids=torch.tensor([0, 0, 1])
    )
    output = policy_loss(inputs, loss_config(name, mismatch=mode))
    output.loss_sum.backward()
    assert output.keep_mask.tolist() == [True, True, False]
    assert logprobs.grad[2] == 0 and logprobs.grad[0] != 0
    assert int(output.num_tokens) == 3
    rest, _ = make_inputs(pi[:2], mu[:2], [1.0, -1.0], recomputed_logprobs=recomputed[:2])
    assert output.loss_sum.item() == pytest.approx(policy_loss(rest, loss_config(name)).loss_sum.item())


def test_minirl_masks_by_recomputed_logprobs_and_weighs_by_mu() -> None:
    inputs, logprobs = make_inputs(
        [0.6, 0.6], [0.5, 0.3], [1.0, 1.0], recomputed_logprobs=torch.tensor([0.3, 0.55], dtype=torch.float64).log()
    )
    output = policy_loss(inputs, LossConfig(name="minirl"))
    output.loss_sum.backward()
    assert output.keep_mask.tolist() == [False, True]
    assert logprobs.grad.tolist() == pytest.approx([0.0, -2.0])


def test_recomputed_logprobs_set_the_direction_too() -> None:
    # pi moved down from pi', up from mu: pushing it further down leads away from pi' only.
    recomputed = torch.tensor([0.7], dtype=torch.float64).log()
    inputs, _ = make_inputs([0.4], [0.2], [-1.0], recomputed_logprobs=recomputed)
    assert not policy_loss(inputs, LossConfig(name="dppo_recompute_binary_tv")).keep_mask.any()
    assert not policy_loss(inputs, LossConfig(name="dppo_recompute_binary_kl")).keep_mask.any()
    assert policy_loss(inputs, LossConfig(name="dppo_binary_tv")).keep_mask.all()


def test_decoupled_ppo_clips_by_recomputed_logprobs_and_weighs_even_the_clipped_value() -> None:
    # pi / pi' = 2 and 1.25, pi' / mu = 1.5 and 4 (limited to 2)
    recomputed = torch.tensor([0.3, 0.4], dtype=torch.float64).log()
    inputs, logprobs = make_inputs([0.6, 0.5], [0.2, 0.1], [1.0, 1.0], recomputed_logprobs=recomputed)
    output = policy_loss(inputs, LossConfig(name="ppo_decoupled", mismatch="truncate"))
    output.loss_sum.backward()
    assert output.loss_sum.item() == pytest.approx(-1.28 * 1.5 - 1.25 * 2)
    assert logprobs.grad.tolist() == pytest.approx([0.0, -2.5])


@pytest.mark.parametrize("name", ["minirl", "ppo_decoupled", "dppo_recompute_binary_tv", "dppo_recompute_binary_kl"])
def test_missing_recomputed_logprobs_are_named(name: str) -> None:
    inputs, _ = make_inputs([0.5], [0.5], [1.0])
    with pytest.raises(ValueError, match=f"'{name}' needs recomputed_logprobs"):
        policy_loss(dataclasses.replace(inputs, recomputed_logprobs=None), LossConfig(name=name))


def _kl(estimator: str, log_pi: Tensor, log_ref: Tensor) -> Tensor:
    d = log_pi - log_ref
    return {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}[estimator]


@pytest.mark.parametrize("anchor", ["reference", "rollout"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_penalty_is_added_for_every_token_of_the_loss_mask_masked_ones_included(estimator: str, anchor: str) -> None:
    reference = torch.tensor([0.3, 0.7, 0.4], dtype=torch.float64).log()
    inputs, logprobs = make_inputs([0.8, 0.2, 0.5], [0.3, 0.4, 0.5], [1.0, 0.0, 1.0], [True, True, False])
    inputs = dataclasses.replace(inputs, reference_logprobs=reference if anchor == "reference" else None)
    plain = policy_loss(inputs, LossConfig())
    output = policy_loss(inputs, LossConfig(kl_coef=0.3, kl_estimator=estimator, kl_target=anchor))
    output.loss_sum.backward()
    assert output.keep_mask.tolist() == [False, True, False]  # the first is outside the trust region
    other = logprobs.detach().clone().requires_grad_()
    to = reference if anchor == "reference" else inputs.rollout_logprobs
    penalty = 0.3 * _kl(estimator, other, to)[:2].sum()
    penalty.backward()
    assert output.loss_sum.item() - plain.loss_sum.item() == pytest.approx(penalty.item())
    torch.testing.assert_close(logprobs.grad, other.grad)


def test_kl_penalty_of_probability_zero_is_large_but_finite() -> None:
    inputs, logprobs = make_inputs([0.0, 0.5], [0.5, 0.5], [0.0, 0.0])
    output = policy_loss(inputs, LossConfig(kl_coef=1.0, kl_target="rollout"))
    output.loss_sum.backward()
    assert math.isfinite(output.loss_sum.item()) and logprobs.grad.tolist() == [0.0, 0.0]


def test_a_missing_reference_is_named() -> None:
    inputs, _ = make_inputs([0.5], [0.5], [1.0])
    with pytest.raises(ValueError, match=r"reference_logprobs because of loss\.kl_coef"):
        policy_loss(inputs, LossConfig(kl_coef=0.1))


def test_entropy_bonus_has_the_gradient_of_the_entropy_over_the_loss_mask() -> None:
    inputs, _ = make_inputs([0.5, 0.5], [0.5, 0.5], [0.0, 0.0], [True, False])
    entropy = torch.tensor([1.0, math.nan], dtype=torch.float64, requires_grad=True)
    output = policy_loss(dataclasses.replace(inputs, entropy=entropy), LossConfig(entropy_coef=0.25))
    output.loss_sum.backward()
    assert output.loss_sum.item() == -0.25
    assert entropy.grad.tolist() == [-0.25, 0.0]
    assert value(output, "entropy") == 1.0


def test_an_entropy_bonus_without_entropy_or_without_its_gradient_is_refused() -> None:
    inputs, _ = make_inputs([0.5], [0.5], [1.0])
    with pytest.raises(ValueError, match=r"loss\.entropy_coef"):
        policy_loss(inputs, LossConfig(entropy_coef=0.1))
    with pytest.raises(ValueError, match="carries no gradient"):
        policy_loss(dataclasses.replace(inputs, entropy=torch.ones(1)), LossConfig(entropy_coef=0.1))


@pytest.mark.parametrize("name", ["pg_is", "cispo"])
def test_ratio_form_has_the_gradient_of_the_reinforce_form_below_the_cap_and_none_above(name: str) -> None:
    pi, mu, advantages = [0.6, 0.9, 0.0], [0.5, 0.1, 0.3], [1.0, -1.0, -1.0]
    gradients = {}
    for form in ("reinforce", "ratio"):
        inputs, logprobs = make_inputs(pi, mu, advantages)
        output = policy_loss(inputs, LossConfig(name=name, ratio_cap=3.0, form=form))
        output.loss_sum.backward()
        gradients[form] = logprobs.grad.tolist()
    assert output.loss_sum.item() == pytest.approx(-1.2 + 3.0)
    assert gradients["reinforce"] == pytest.approx([-1.2, 3.0, 0.0])
    assert gradients["ratio"] == pytest.approx([-1.2, 0.0, 0.0])


def test_a_floor_on_the_ratio_of_probability_zero_gives_zero_instead_of_infinity() -> None:
    inputs, logprobs = make_inputs([0.0], [0.5], [1.0])
    output = policy_loss(inputs, LossConfig(name="cispo", ratio_floor=0.8))
    output.loss_sum.backward()
    assert output.loss_sum.item() == 0 and logprobs.grad.tolist() == [0.0]
