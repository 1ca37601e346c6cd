"""Predictive divergence masks and score centering against whole distributions: finite differences, exact sums."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.head.loss import dppo_head_loss
from megatron_dppo.head.stats import loss_inputs, vocab_parallel_head_stats
from megatron_dppo.losses import divergence_rate, policy_loss, policy_objective, predictive_sums
from megatron_dppo.losses.predictive import Tail, tail_square
from megatron_dppo.types import LossInputs, SamplingMask, TokenTargets
from tests.unit.loss_inputs import loss_config, topk_fields, value

VOCABULARY, TOKENS = 12, 400
Measure = Callable[[Tensor, Tensor], Tensor]


def total_variation(pi: Tensor, mu: Tensor) -> Tensor:
    return (pi - mu).abs().sum(-1) / 2


def relative_entropy(pi: Tensor, mu: Tensor) -> Tensor:
    return (mu * (mu / pi).log()).sum(-1)


MEASURES: dict[str, Measure] = {"tv": total_variation, "kl": relative_entropy}


def policies(seed: int = 0, scale: float = 1.5) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of pi, mu ``[T, V]`` and sampled ids."""
    generator = torch.Generator().manual_seed(seed)
    logits, mu = scale * torch.randn(2, TOKENS, VOCABULARY, generator=generator, dtype=torch.float64)
    return logits, mu.softmax(-1), torch.randint(VOCABULARY, (TOKENS,), generator=generator)


def members(mu: Tensor, sampled: Tensor, k: int) -> Tensor:
    """``[T, V]`` bool, TopK(mu, k) and the sampled token."""
    top = torch.zeros_like(mu).scatter(-1, mu.topk(k, dim=-1).indices, 1.0).bool()
    return top.scatter(-1, sampled[:, None], True)


def buckets(p: Tensor, inside: Tensor) -> Tensor:
    """``[T, V + 1]`` each member's own mass and, last, that of the rest (1e-300 where there is none: 0 log 0)."""
    rest = torch.where(inside, 0.0, p).sum(-1, keepdim=True)
    return torch.cat([torch.where(inside, p, 1e-300), rest.clamp(min=1e-300)], -1)


def rate(kind: str, logits: Tensor, mu: Tensor, sampled: Tensor, k: int, tail: Tail = "proportional") -> Tensor:
    pi = logits.softmax(-1)
    fields = topk_fields(pi, mu, sampled, k)
    sums = predictive_sums(fields["topk_logprobs"], fields["rollout_topk_logprobs"], fields["topk_valid"])
    p_other = fields["topk_other_logprob"].exp()
    m_other = torch.where(members(mu, sampled, k), 0.0, mu).sum(-1)
    others = VOCABULARY - fields["topk_valid"].sum(-1)
    square = tail_square(tail, p_other, fields["topk_other_square"], others)
    at_label = tuple(x.gather(-1, sampled[:, None])[:, 0] for x in (pi, mu))
    return divergence_rate(kind, sums, at_label, (p_other, m_other), square)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["tv", "kl"])
@pytest.mark.parametrize("k", [1, 3, 11])
def test_the_rate_is_the_finite_difference_of_the_divergence_along_the_update(kind: str, k: int) -> None:
    """The difference is that of the divergence on the buckets, along e_k - pi of the whole vocabulary's logits."""
    logits, mu, sampled = policies()
    inside = members(mu, sampled, k)
    update = torch.nn.functional.one_hot(sampled, VOCABULARY) - logits.softmax(-1)
    step = 1e-6

    def moved(by: float) -> Tensor:
        return MEASURES[kind](buckets((logits + by * update).softmax(-1), inside), buckets(mu, inside))

    slope = (moved(step) - moved(-step)) / (2 * step)
    result = rate(kind, logits, mu, sampled, k)
    # At a kink of the total variation the two sides differ; a step of 1e-6 meets none here.
    torch.testing.assert_close(result, slope, rtol=1e-6, atol=1e-8)
    if k == 11:
        whole = [MEASURES[kind]((logits + by * update).softmax(-1), mu) for by in (step, -step)]
        torch.testing.assert_close(result, (whole[0] - whole[1]) / (2 * step), rtol=1e-6, atol=1e-8)


def test_estimated_tails_follow_their_formulas_and_differ_from_the_exact_one() -> None:
    """A tail of one token is `aggregated`, a flat one `uniform`; the KL's derivative written out once more."""
    logits, mu, sampled = policies(1)
    pi, k = logits.softmax(-1), 4
    inside = members(mu, sampled, k)
    p_rest, m_rest = (torch.where(inside, 0.0, x).sum(-1) for x in (pi, mu))
    left = (~inside).sum(-1)
    at = [x.gather(-1, sampled[:, None])[:, 0] for x in (pi, mu)]
    of_set = at[0] - at[1] + torch.where(inside, pi * (mu - pi), 0.0).sum(-1)
    aggregated = rate("kl", logits, mu, sampled, k, "aggregated")
    torch.testing.assert_close(aggregated, of_set + p_rest * (m_rest - p_rest), rtol=1e-10, atol=1e-12)
    uniform = rate("kl", logits, mu, sampled, k, "uniform")
    torch.testing.assert_close(uniform, of_set + p_rest * (m_rest - p_rest) / left, rtol=1e-10, atol=1e-12)
    assert (aggregated.sign() != rate("kl", logits, mu, sampled, k).sign()).any()
    flat = torch.where(inside, logits, logits.amin(-1, keepdim=True))
    for kind in ("tv", "kl"):
        exact = rate(kind, flat, mu, sampled, k)
        torch.testing.assert_close(rate(kind, flat, mu, sampled, k, "uniform"), exact, rtol=1e-9, atol=1e-12)
        full = rate(kind, logits, mu, sampled, 11)
        torch.testing.assert_close(rate(kind, logits, mu, sampled, 11, "aggregated"), full, rtol=1e-9, atol=1e-12)


def test_with_the_sampled_token_alone_the_sign_is_that_of_its_own_move() -> None:
    """Why there is no predictive Binary mask."""
    logits, mu, sampled = policies(2)
    pi = logits.softmax(-1)
    at = [x.gather(-1, sampled[:, None]) for x in (pi, mu)]
    rest_square = pi.square().sum(-1) - at[0][:, 0].square()
    valid = torch.ones(TOKENS, 1, dtype=torch.bool)
    sums = predictive_sums(at[0].log(), at[1].log(), valid)
    p, m = at[0][:, 0], at[1][:, 0]
    for kind in ("tv", "kl"):
        for square in (rest_square, (1 - p) ** 2, (1 - p) ** 2 / (VOCABULARY - 1)):
            result = divergence_rate(kind, sums, (p, m), (1 - p, 1 - m), square)  # type: ignore[arg-type]
            assert (result.sign() == (p - m).sign()).all()


def test_sums_of_parts_of_the_slots_add_up() -> None:
    logits, mu, sampled = policies(3)
    fields = topk_fields(logits.softmax(-1), mu, sampled, 5)
    columns = [fields[name] for name in ("topk_logprobs", "rollout_topk_logprobs", "topk_valid")]
    whole = predictive_sums(*columns)
    parts = [predictive_sums(*(x[:, part] for x in columns)) for part in (slice(0, 2), slice(2, 6))]
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-12, atol=1e-15)


def inputs_of(logits: Tensor, mu: Tensor, sampled: Tensor, advantages: Tensor, k: int) -> tuple[LossInputs, Tensor]:
    """Inputs of a loss, and the logits as their leaf."""
    leaf = logits.clone().requires_grad_()
    log_p = leaf.log_softmax(-1)
    ids = torch.cat([torch.sort(mu, dim=-1, descending=True, stable=True).indices[:, :k], sampled[:, None]], -1)
    fields = topk_fields(log_p.detach().exp(), mu, sampled, k) | {"topk_logprobs": log_p.gather(-1, ids)}
    return (
        LossInputs(
            logprobs=log_p.gather(-1, sampled[:, None])[:, 0],
            advantages=advantages,
            loss_mask=torch.ones(len(sampled), dtype=torch.bool),
            rollout_logprobs=mu.gather(-1, sampled[:, None])[:, 0].log(),
            vocab_size=VOCABULARY,
            **fields,
        ),
        leaf,
    )


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_updates_beyond_the_threshold_that_raise_the_divergence_are_masked(kind: str) -> None:
    logits, mu, sampled = policies(4)
    advantages = torch.randn(TOKENS, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    k, threshold = 4, 0.3
    inputs, _ = inputs_of(logits, mu, sampled, advantages, k)
    keys = {"topk": k, "divergence_threshold_low": threshold, "divergence_threshold_high": threshold}
    config = LossConfig(name=f"dppo_topk_{kind}", direction="predictive", **keys)
    output = policy_loss(inputs, config)
    inside, step = members(mu, sampled, k), 1e-7
    update = advantages[:, None] * (torch.nn.functional.one_hot(sampled, VOCABULARY) - logits.softmax(-1))
    here, further = (
        MEASURES[kind](buckets((logits + by * update).softmax(-1), inside), buckets(mu, inside)) for by in (0.0, step)
    )
    want = ~((here > threshold) & (further > here))
    assert torch.equal(output.keep_mask, want) and 0 < int((~want).sum()) < TOKENS
    plain = policy_loss(inputs, LossConfig(name=f"dppo_topk_{kind}", **keys)).keep_mask
    assert not torch.equal(plain, want)
    by_sums = dataclasses.replace(
        inputs,
        topk_logprobs=None,
        topk_sums=predictive_sums(inputs.topk_logprobs, inputs.rollout_topk_logprobs, inputs.topk_valid),
    )
    assert torch.equal(policy_loss(by_sums, config).keep_mask, want)


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_under_a_filter_a_uniform_tail_is_flat_over_the_allowed_ids(kind: str) -> None:
    """Each token's twelve allowed ids of 200, against a vocabulary of those twelve; both ways through the head."""
    logits, mu, sampled = policies(10)
    advantages = torch.randn(TOKENS, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
    config = LossConfig(
        **{"name": f"dppo_topk_{kind}", "topk": 4, "direction": "predictive", "tail": "uniform"},
        **{"divergence_threshold_low": 0.1, "divergence_threshold_high": 0.1},
    )
    inputs, _ = inputs_of(logits, mu, sampled, advantages, 4)
    want = policy_loss(inputs, config).keep_mask
    assert not torch.equal(want, policy_loss(dataclasses.replace(inputs, vocab_size=200), config).keep_mask)
    none = dataclasses.replace(inputs, allowed_counts=torch.zeros(TOKENS, dtype=torch.int32))
    assert torch.equal(want, policy_loss(none, config).keep_mask)

    generator = torch.Generator().manual_seed(12)
    places = torch.stack([torch.randperm(200, generator=generator)[:VOCABULARY] for _ in range(TOKENS)])
    wide = torch.randn(TOKENS, 200, generator=generator, dtype=torch.float64).scatter(1, places, logits)
    top = torch.sort(mu, dim=-1, descending=True, stable=True).indices[:, :4]
    labels = places.gather(1, sampled[:, None])
    last = torch.where((top == sampled[:, None]).any(1, keepdim=True), -1, labels)
    targets = TokenTargets(
        labels=labels[:, 0],
        advantages=advantages,
        loss_mask=torch.ones(TOKENS, dtype=torch.bool),
        rollout_logprobs=inputs.rollout_logprobs,
        rollout_topk_ids=torch.cat([places.gather(1, top), last], 1).int(),
        rollout_topk_logprobs=inputs.rollout_topk_logprobs,
        sampling_mask=SamplingMask(places.flatten().int(), torch.full((TOKENS,), VOCABULARY, dtype=torch.int32)),
    )
    head: dict[str, Any] = {"group": None, "vocab_size": 200}
    eye, objective = torch.eye(200, dtype=torch.float64), policy_objective(config)
    fused = dppo_head_loss(wide, eye, targets, objective.loss, needs=objective.needs, **head)
    assert torch.equal(fused.keep_mask, want)
    slots = targets.rollout_topk_ids[:, :-1].long()
    result = vocab_parallel_head_stats(
        wide,
        eye,
        targets.labels,
        ids=slots,
        ids_valid=slots >= 0,
        sampling_mask=targets.sampling_mask,
        needs=objective.needs,
        **head,
    )
    assert torch.equal(policy_loss(loss_inputs(targets, result, 200), config).keep_mask, want)


@pytest.mark.parametrize("kind", ["tv", "kl"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_nan_does_not_disable_the_predicted_direction(kind: str, sign: float) -> None:
    """Outward by the sampled token, and a slot whose mu is unknown: as with the direction of that token."""
    pi, mu = (0.9, 0.3) if sign > 0 else (0.3, 0.9)
    inputs = LossInputs(
        logprobs=torch.tensor([pi]).log(),
        rollout_logprobs=torch.tensor([mu]).log(),
        advantages=torch.tensor([sign]),
        loss_mask=torch.tensor([True]),
        topk_logprobs=torch.tensor([[pi, 0.05, 1.0]]).log(),
        rollout_topk_logprobs=torch.tensor([[math.log(mu), math.nan, 0.0]]),
        topk_valid=torch.tensor([[True, True, False]]),
        topk_other_logprob=torch.tensor([0.05]).log(),
        topk_other_square=torch.tensor([0.0025]),
    )
    for direction in ("sampled", "predictive"):
        config = LossConfig(name=f"dppo_topk_{kind}", topk=2, direction=direction)
        assert not policy_loss(inputs, config).keep_mask.any(), direction


def test_missing_inputs_of_the_tail_are_named() -> None:
    logits, mu, sampled = policies()
    inputs, _ = inputs_of(logits, mu, sampled, torch.ones(TOKENS), 4)
    for tail, field in (("proportional", "topk_other_square"), ("uniform", "vocab_size")):
        config = LossConfig(name="dppo_topk_tv", topk=4, direction="predictive", tail=tail)
        with pytest.raises(ValueError, match=f"loss.tail.*{field}"):
            policy_loss(dataclasses.replace(inputs, **{field: None}), config)
    narrow = dataclasses.replace(inputs, topk_logprobs=None, topk_sums=torch.zeros(TOKENS, 2))
    with pytest.raises(ValueError, match="predictive_sums"):
        policy_loss(narrow, LossConfig(name="dppo_topk_tv", topk=4, direction="predictive", tail="aggregated"))


FULL = VOCABULARY - 1
WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": torch.ones_like,
    "truncate": lambda r: r.clamp(max=2.0),
    "mask": lambda r: torch.where((r >= 0.5) & (r <= 2.0), r, 0.0),
}


@pytest.mark.parametrize("centering", WEIGHTS)
def test_centering_subtracts_the_expectation_of_the_score_under_the_sampler(centering: str) -> None:
    """With a head of all ids but one the gradient of each token's logits is that of the exact baseline."""
    logits, mu, sampled = policies(6, 0.8)
    advantages = torch.randn(TOKENS, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    inputs, leaf = inputs_of(logits, mu, sampled, advantages, FULL)
    config = LossConfig(name="score_centering", topk=FULL, centering=centering)
    output = policy_loss(inputs, config)
    output.loss_sum.backward()
    pi, f = logits.softmax(-1), WEIGHTS[centering]
    scores = torch.eye(VOCABULARY, dtype=torch.float64) - pi[:, None, :]  # [T, id, logit]: the gradient of log pi(id)
    ratio = pi / mu
    expectation = (mu * f(ratio))[:, None, :] @ scores
    own = scores[torch.arange(TOKENS), sampled] * f(ratio).gather(-1, sampled[:, None])
    want = -advantages[:, None] * (own - expectation[:, 0])
    torch.testing.assert_close(leaf.grad, want, rtol=1e-9, atol=1e-10)
    assert output.keep_mask.all() == (centering != "mask")
    assert value(output, "ratio") == pytest.approx(float(ratio.gather(-1, sampled[:, None]).mean()))


@pytest.mark.parametrize("centering", WEIGHTS)
def test_the_centered_gradient_has_no_expectation_under_the_sampler_where_the_tails_are_proportional(
    centering: str,
) -> None:
    """Advantage 1 everywhere, every id sampled with its own probability: nothing is left."""
    generator, k = torch.Generator().manual_seed(8), 4
    logits, mu_logits = torch.randn(2, 1, VOCABULARY, generator=generator, dtype=torch.float64)
    mu = mu_logits.softmax(-1)
    rest = ~members(mu, mu.argmax(-1), k)
    logits = torch.where(rest, mu.log() + 0.3, logits)  # outside the head pi is mu times a constant
    every = torch.arange(VOCABULARY)
    inputs, leaf = inputs_of(logits.expand(VOCABULARY, -1), mu.expand(VOCABULARY, -1), every, mu[0], k)
    policy_loss(inputs, LossConfig(name="score_centering", topk=k, centering=centering)).loss_sum.backward()
    assert float(leaf.grad.sum(0).abs().max()) < 1e-9
    uncentered, plain = inputs_of(logits.expand(VOCABULARY, -1), mu.expand(VOCABULARY, -1), every, mu[0], k)
    policy_loss(uncentered, LossConfig(name="cispo", ratio_cap=2.0)).loss_sum.backward()
    assert float(plain.grad.sum(0).abs().max()) > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_centering_is_computed_in_fp32_from_narrower_numbers(dtype: torch.dtype) -> None:
    logits, mu, sampled = policies(13)
    given, _ = inputs_of(logits.float(), mu.float(), sampled, torch.ones(TOKENS), 4)
    assert given.topk_logprobs is not None
    config = LossConfig(name="score_centering", topk=4)

    def of(wide: torch.dtype) -> tuple[Tensor, Tensor]:
        slots = given.topk_logprobs.detach().to(dtype).to(wide).requires_grad_()
        logprobs = given.logprobs.detach().to(dtype).to(wide).requires_grad_()
        loss = policy_loss(dataclasses.replace(given, logprobs=logprobs, topk_logprobs=slots), config).loss_sum
        loss.backward()
        return loss.detach(), slots.grad

    (loss, slots), (want, want_slots) = of(dtype), of(torch.float32)
    torch.testing.assert_close(loss.float(), want, rtol=1e-6, atol=1e-6)
    assert torch.equal(slots, want_slots.to(dtype))


def test_on_policy_nothing_is_subtracted_also_with_a_tiny_tail() -> None:
    _, mu, sampled = policies(9, 6.0)
    advantages = torch.ones(TOKENS, dtype=torch.float64)
    inputs, leaf = inputs_of(mu.log(), mu, sampled, advantages, 8)
    noisy = dataclasses.replace(inputs, rollout_topk_logprobs=inputs.rollout_topk_logprobs.float())
    for given in (inputs, noisy):
        leaf.grad = None
        policy_loss(given, loss_config("score_centering", topk=8)).loss_sum.backward(retain_graph=True)
        want = mu - torch.nn.functional.one_hot(sampled, VOCABULARY)
        torch.testing.assert_close(leaf.grad, want.double(), rtol=0, atol=1e-6)


def test_a_head_without_gradient_is_refused() -> None:
    logits, mu, sampled = policies()
    inputs, _ = inputs_of(logits, mu, sampled, torch.ones(TOKENS), 4)
    assert inputs.topk_logprobs is not None
    cut = dataclasses.replace(inputs, topk_logprobs=inputs.topk_logprobs.detach())
    with pytest.raises(ValueError, match="topk_logprobs carries no gradient"):
        policy_loss(cut, LossConfig(name="score_centering", topk=4))
    with torch.no_grad():
        assert math.isfinite(float(policy_loss(cut, LossConfig(name="score_centering", topk=4)).loss_sum))


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"name": "dppo_binary_tv", "direction": "predictive"}, "direction = predictive"),
        ({"name": "dppo_topk_tv", "tail": "uniform"}, "tail = uniform"),
        ({"name": "score_centering", "mismatch_high": 3.0}, "mismatch_high = 3.0 has no effect"),
        ({"name": "score_centering", "topk_eviction": True}, "topk_eviction = True"),
        ({"kl_estimator": "k1"}, "kl_estimator = k1 has no effect .* kl_coef"),
        ({"kl_target": "rollout"}, "kl_target = rollout"),
        ({"name": "prime_rl/2026-04", "kl_coef": 0.0, "kl_estimator": "k2"}, "kl_estimator = k2 has no effect"),
        ({"name": "xyz"}, r"unknown loss\. Expected"),
    ],
)
def test_keys_without_effect_are_refused(keys: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        LossConfig(**keys)
