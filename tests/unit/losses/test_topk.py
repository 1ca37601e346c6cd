"""Top-K divergences: bounds on whole distributions, eviction, and the traps of real Top-K lists."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.losses import binary_kl, binary_tv, policy_loss, topk_kl, topk_sums, topk_tv
from megatron_dppo.losses.divergence import divergence_from_sums, evict
from megatron_dppo.types import LossInputs
from tests.unit.loss_inputs import loss_config, make_inputs, topk_fields

TRAPS = json.loads((Path(__file__).parents[2] / "data" / "dppo_cases.json").read_text())["traps"]
NAN, INF = math.nan, math.inf
ALL = torch.tensor([[True, True, False]])


def distributions(tokens: int, vocabulary: int, scale: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    """pi, mu ``[T, V]`` and sampled ids."""
    generator = torch.Generator().manual_seed(vocabulary)
    pi, mu = (scale * torch.randn(2, tokens, vocabulary, generator=generator, dtype=torch.float64)).softmax(-1)
    return pi, mu, torch.randint(vocabulary, (tokens,), generator=generator)


def fields(pi: Tensor, mu: Tensor, sampled: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    f = topk_fields(pi, mu, sampled, k)
    return f["topk_logprobs"], f["rollout_topk_logprobs"], f["topk_valid"], f["topk_other_logprob"]


@pytest.mark.parametrize("k", [1, 3, 11, 12])
def test_topk_lies_between_binary_and_exact_and_is_exact_for_the_whole_vocabulary(k: int) -> None:
    pi, mu, sampled = distributions(300, 12)
    log_p, log_m = (x.gather(-1, sampled[:, None])[:, 0].log() for x in (pi, mu))
    exact = {topk_tv: (pi - mu).abs().sum(-1) / 2, topk_kl: (mu * (mu / pi).log()).sum(-1)}
    for measure, binary in ((topk_tv, binary_tv), (topk_kl, binary_kl)):
        result = measure(*fields(pi, mu, sampled, k))
        assert (result >= binary(log_p, log_m) - 1e-9).all()
        assert (result <= exact[measure] + 1e-9).all()
        if k >= 11:
            torch.testing.assert_close(result, exact[measure], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("given", [True, False], ids=["pi of other given", "by subtraction"])
def test_eviction_never_raises_the_divergence_and_with_one_slot_is_the_binary_estimate(given: bool) -> None:
    pi, mu, sampled = distributions(300, 12)
    log_p, log_m = (x.gather(-1, sampled[:, None])[:, 0].log() for x in (pi, mu))
    for measure, binary in ((topk_tv, binary_tv), (topk_kl, binary_kl)):
        for k in (1, 3):
            slots, rollout_slots, valid, other = fields(pi, mu, sampled, k)
            union = measure(slots, rollout_slots, valid, other)
            evicted = measure(slots, rollout_slots, *evict(slots, valid, other if given else None)[:2])
            assert (evicted <= union + 1e-9).all() and (evicted < union - 1e-6).any()
            if k == 1:
                torch.testing.assert_close(evicted, binary(log_p, log_m), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("given", [True, False], ids=["pi of other given", "by subtraction"])
@pytest.mark.parametrize(
    ("valid", "kept"),
    [
        ("1111", "1101"),  # the sampled token replaces the third
        ("1110", "1110"),  # it is among the three
        ("1101", "1101"),  # the engine filled two slots: there is room
        ("1011", "1011"),
        ("0001", "0001"),
        ("0000", "0000"),
    ],
)
def test_eviction_takes_the_kth_slot_only_where_all_are_in_use(valid: str, kept: str, given: bool) -> None:
    pi = torch.tensor([[0.3, 0.2, 0.1, 0.05]], dtype=torch.float64)
    before, want = (torch.tensor([[bit == "1" for bit in bits]]) for bits in (valid, kept))
    other = (1 - torch.where(before, pi, 0.0).sum(-1)).log() if given else None
    result, rest, square = evict(torch.where(before, pi, NAN).log(), before, other, torch.tensor([0.25]).double())
    assert square is not None
    torch.testing.assert_close(square, 0.25 + torch.where(before & ~want, pi, 0.0).square().sum(-1))
    assert torch.equal(result, want)
    if rest is None:
        assert not given
    else:
        torch.testing.assert_close(rest.exp(), 1 - torch.where(want, pi, 0.0).sum(-1))


def test_a_slot_with_mu_zero_and_pi_above_it_counts_for_tv_and_not_for_kl() -> None:
    pi, mu = [0.5, 0.2, 0.1, 0.2], [0.7, 0.2, 0.0, 0.1]  # the last is what no slot holds
    log_p, log_m = (torch.tensor([side[:3]], dtype=torch.float64).log() for side in (pi, mu))
    valid = torch.ones(1, 3, dtype=torch.bool)
    tv = sum(abs(p - m) for p, m in zip(pi, mu, strict=True)) / 2
    kl = sum(m * math.log(m / p) for p, m in zip(pi, mu, strict=True) if m)
    for other in (None, torch.tensor([0.2], dtype=torch.float64).log()):
        assert float(topk_tv(log_p, log_m, valid, other)) == pytest.approx(tv, rel=1e-12)
        assert float(topk_kl(log_p, log_m, valid, other)) == pytest.approx(kl, rel=1e-12)
    sums = topk_sums(log_p, log_m, valid)
    for kind, want in (("tv", tv), ("kl", kl)):
        result = divergence_from_sums(kind, sums, log_m, valid, torch.tensor([0.2], dtype=torch.float64).log())
        assert float(result) == pytest.approx(want, rel=1e-12)
    unused = torch.tensor([[True, True, False]])  # not a slot of probability 0: its mass of pi is part of `other`
    assert float(topk_tv(log_p, log_m, unused)) == pytest.approx((0.2 + 0.0 + 0.2) / 2, rel=1e-12)


def test_an_id_that_top_p_excludes_from_the_rollout_is_a_probability_of_zero_and_no_nan() -> None:
    trap = TRAPS["top_p"]
    mu, pi = (torch.tensor([trap[key]], dtype=torch.float64) for key in ("mu_renormalised", "pi_full"))
    whole = fields(pi, mu, torch.tensor([0]), 4)
    assert whole[1][0, 2] == -INF
    assert float(topk_tv(*whole)) == pytest.approx(trap["exact_tv"], rel=1e-9)
    want = sum(m * math.log(m / p) for m, p in zip(mu[0].tolist(), pi[0].tolist(), strict=True) if m > 0)
    # Of mu, nothing is left for `other`, whose floor is 1e-12.
    assert float(topk_kl(*whole)) == pytest.approx(want, abs=1e-9)
    pushed = torch.tensor([[0.1, 0.2, 0.3, 0.1, 0.1, 0.1, 0.05, 0.05]], dtype=torch.float64)
    inputs = LossInputs(
        logprobs=pushed[:, 0].log(),
        advantages=torch.tensor([-1.0]),
        loss_mask=torch.tensor([True]),
        rollout_logprobs=mu[:, 0].log(),
        **topk_fields(pushed, mu, torch.tensor([0]), 4),
    )
    assert not policy_loss(inputs, loss_config("dppo_topk_kl", topk=4)).keep_mask.any()


def test_kl_is_infinite_where_pi_excludes_an_id_that_mu_samples_and_zero_where_both_do() -> None:
    log_m = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]).log()
    log_p = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]).log()
    valid = torch.ones(2, 3, dtype=torch.bool)
    assert topk_kl(log_p, log_m, valid).tolist() == [INF, 0.0]
    assert topk_tv(log_p, log_m, valid).tolist() == [0.5, 0.0]


@pytest.mark.parametrize("junk", [NAN, INF, -INF, 0.0, -1.0])
@pytest.mark.parametrize("measure", [topk_tv, topk_kl])
def test_values_in_invalid_slots_have_no_effect(measure: Any, junk: float) -> None:
    log_p = torch.tensor([[0.5, 0.2, 0.0]]).log()
    log_m = torch.tensor([[0.4, 0.3, 0.0]]).log()
    want = measure(log_p, log_m, ALL)
    log_p[0, 2] = log_m[0, 2] = junk
    assert torch.equal(measure(log_p, log_m, ALL), want)


def test_slots_that_sum_to_more_than_one_leave_an_other_of_zero_not_a_negative_one() -> None:
    log_p, log_m = torch.tensor([[0.7, 0.3001, 0.0]]).log(), torch.tensor([[0.7001, 0.3, 0.0]]).log()
    assert float(topk_tv(log_p, log_m, ALL)) == pytest.approx(1e-4, rel=1e-2)
    assert 0 <= float(topk_kl(log_p, log_m, ALL)) < 1e-3


def test_a_given_pi_of_other_is_used_instead_of_the_subtraction() -> None:
    log_p, log_m = torch.tensor([[0.6, 0.4, 0.0]]).log(), torch.tensor([[0.6, 0.3, 0.0]]).log()
    assert float(topk_tv(log_p, log_m, ALL)) == pytest.approx(0.1, rel=1e-5)
    assert float(topk_tv(log_p, log_m, ALL, torch.tensor([math.log(0.3)]))) == pytest.approx(0.15, rel=1e-5)


def test_the_mass_of_other_does_not_cancel_in_fp32_when_it_is_given() -> None:
    log_m = torch.tensor([[math.log(0.9), math.log(0.1 - 1e-5), 0.0]], dtype=torch.float64)
    log_p = torch.tensor([[math.log(0.9), math.log1p(-0.9 - 1e-12), 0.0]], dtype=torch.float64)
    exact = 1e-5 * math.log(1e-5 / 1e-10) + (0.1 - 1e-5) * math.log1p(-1e-4)
    result = topk_kl(log_p.float(), log_m.float(), ALL, torch.tensor([math.log(1e-10)]))
    assert float(result) == pytest.approx(exact, rel=1e-2)
    assert float(topk_kl(log_p.float(), log_m.float(), ALL)) != pytest.approx(exact, rel=1e-2)


def test_bf16_slots_are_converted_before_any_arithmetic() -> None:
    log_p, log_m = torch.tensor([[-0.03, -4.0, 0.0]]).bfloat16(), torch.tensor([[-0.04, -3.5, 0.0]]).bfloat16()
    for measure in (topk_tv, topk_kl):
        result = measure(log_p, log_m, ALL)
        assert result.dtype == torch.float32
        assert float(result) == pytest.approx(float(measure(log_p.double(), log_m.double(), ALL)), rel=1e-6)


def test_topk_has_no_gradient() -> None:
    inputs, logprobs = make_inputs([0.5, 0.3], [0.4, 0.5], [1.0, -1.0])
    extra = {n: getattr(inputs, n).clone().requires_grad_() for n in ("topk_logprobs", "topk_other_logprob")}
    policy_loss(dataclasses.replace(inputs, **extra), loss_config("dppo_topk_tv")).loss_sum.backward()
    assert logprobs.grad is not None and all(x.grad is None for x in extra.values())


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_a_nan_in_the_topk_masks_an_outward_update(kind: str) -> None:
    inputs, _ = make_inputs([0.5, 0.3], [0.4, 0.5], [1.0, 1.0])
    broken = dataclasses.replace(inputs, topk_logprobs=torch.full((2, 3), NAN))
    config = loss_config(f"dppo_topk_{kind}")
    assert policy_loss(broken, config).keep_mask.tolist() == [False, True]


@pytest.mark.parametrize("missing", ["topk_logprobs", "rollout_topk_logprobs", "topk_valid"])
def test_a_missing_topk_input_is_named(missing: str) -> None:
    inputs, _ = make_inputs([0.5], [0.4], [1.0])
    with pytest.raises(ValueError, match=f"'dppo_topk_tv' needs {missing}"):
        policy_loss(dataclasses.replace(inputs, **{missing: None}), loss_config("dppo_topk_tv"))


def test_topk_fields_with_a_wrong_shape_or_k_are_refused() -> None:
    inputs, _ = make_inputs([0.5], [0.4], [1.0])
    with pytest.raises(ValueError, match=r"topk_logprobs has 3 slots, .* 21; .*loss.topk to 2"):
        policy_loss(inputs, loss_config("dppo_topk_tv", topk=20))
    with pytest.raises(ValueError, match=r"topk_valid has shape \(1, 2\)"):
        policy_loss(dataclasses.replace(inputs, topk_valid=ALL[:, :2]), loss_config("dppo_topk_tv"))
    with pytest.raises(ValueError, match=r"topk_valid must be bool"):
        policy_loss(dataclasses.replace(inputs, topk_valid=ALL.float()), loss_config("dppo_topk_tv"))


@pytest.mark.parametrize("name", ["dppo_topk_tv", "dppo_topk_kl"])
def test_sums_of_parts_of_the_slots_give_the_loss_of_the_slots(name: str) -> None:
    pi, mu, sampled = distributions(40, 12)
    k = 5
    f = topk_fields(pi, mu, sampled, k)
    logprobs = pi.gather(-1, sampled[:, None])[:, 0].log().requires_grad_()
    whole = LossInputs(
        logprobs=logprobs,
        advantages=torch.randn(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
        loss_mask=torch.arange(40) % 7 != 0,
        rollout_logprobs=mu.gather(-1, sampled[:, None])[:, 0].log(),
        **f,
    )
    parts = [slice(0, 2), slice(2, k), slice(k, k + 1)]
    fields_of = [f["topk_logprobs"], f["rollout_topk_logprobs"], f["topk_valid"]]
    sums = sum((topk_sums(*(x[:, part] for x in fields_of)) for part in parts), torch.zeros(40, 2).double())
    config = loss_config(name, topk=k, divergence_threshold_low=0.2, divergence_threshold_high=0.2)
    outputs = [
        policy_loss(inputs, config)
        for inputs in (whole, dataclasses.replace(whole, topk_logprobs=None, topk_sums=sums))
    ]
    assert 0 < int(outputs[0].keep_mask.sum()) < int(whole.loss_mask.sum())
    assert torch.equal(outputs[0].keep_mask, outputs[1].keep_mask)
    torch.testing.assert_close(outputs[0].loss_sum, outputs[1].loss_sum)
    for metric, (value, count, _) in outputs[0].metrics.items():
        torch.testing.assert_close((value, count), outputs[1].metrics[metric][:2], msg=metric)
    with pytest.raises(ValueError, match="topk_eviction = true"):
        policy_loss(
            dataclasses.replace(whole, topk_logprobs=None, topk_sums=sums),
            loss_config(name, topk=k, topk_eviction=True),
        )
