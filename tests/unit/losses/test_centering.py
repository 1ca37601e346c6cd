"""Score centering beside every loss of single tokens, against whole distributions in float64.

The weights of the losses are written here once more, id by id, from their formulas; the package's own are not called.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.config.loss_registry import loss_classes
from megatron_dppo.head.loss import dppo_head_loss
from megatron_dppo.losses import policy_loss, policy_objective
from megatron_dppo.types import LossInputs, SamplingMask, TokenTargets
from tests.unit.loss_inputs import topk_fields

V = 7
"""Ids of the vocabulary."""
LIMIT = {"divergence_threshold_low": 0.06, "divergence_threshold_high": 0.09}
LOW, HIGH = 0.06, 0.09
Rule = Callable[[float, float, float, list[tuple[float, float]]], float]
"""pi and mu of an id, the advantage, and pi and mu of all ids -> the factor of ``- A grad log pi``."""


def outward(p: float, m: float, a: float) -> bool:
    return a * (p - m) > 0


def side(a: float) -> float:
    return HIGH if a > 0 else LOW


def binary_kl(p: float, m: float) -> float:
    return m * math.log(m / p) + (1 - m) * math.log((1 - m) / (1 - p))


def slope(p: float, m: float, every: list[tuple[float, float]]) -> float:
    """The derivative of the KL along e_k - pi."""
    return p - m + sum(x * (y - x) for x, y in every)


def clipped(p: float, m: float, a: float) -> float:
    return 0.0 if (a > 0 and p / m > 1.28) or (a < 0 and p / m < 0.8) else p / m


def sapo(p: float, m: float, a: float) -> float:
    gate = 1 / (1 + math.exp(-(1.0 if a > 0 else 1.05) * (p / m - 1)))
    return p / m * 4 * gate * (1 - gate)


RULES: dict[str, tuple[dict[str, Any], Rule]] = {
    "dppo_binary_tv": (
        {"name": "dppo_binary_tv", "ratio_cap": 1.5, **LIMIT},
        lambda p, m, a, _: 0.0 if outward(p, m, a) and abs(p - m) > side(a) else min(p / m, 1.5),
    ),
    "dppo_binary_tv, ratio form": (
        {"name": "dppo_binary_tv", "ratio_cap": 1.5, "form": "ratio", **LIMIT},
        lambda p, m, a, _: 0.0 if p / m > 1.5 or (outward(p, m, a) and abs(p - m) > side(a)) else p / m,
    ),
    "dppo_binary_kl": (
        {"name": "dppo_binary_kl", **LIMIT},
        lambda p, m, a, _: 0.0 if outward(p, m, a) and binary_kl(p, m) > side(a) else min(p / m, 5.0),
    ),
    "dppo_topk_tv": (
        {"name": "dppo_topk_tv", "divergence_threshold_low": 0.25, "divergence_threshold_high": 0.3},
        lambda p, m, a, every: (
            0.0
            if outward(p, m, a) and sum(abs(x - y) for x, y in every) / 2 > (0.3 if a > 0 else 0.25)
            else min(p / m, 5.0)
        ),
    ),
    "dppo_topk_kl predictive": (
        {"name": "dppo_topk_kl", "direction": "predictive", "ratio_cap": 2.0, **LIMIT},
        lambda p, m, a, every: (
            0.0
            if a * slope(p, m, every) > 0 and sum(y * math.log(y / x) for x, y in every) > side(a)
            else min(p / m, 2.0)
        ),
    ),
    "drpo": (
        {"name": "drpo", **LIMIT},
        lambda p, m, a, _: p / m * (1 - math.copysign(1, a) * (p - m) / side(a)),
    ),
    "spo": (
        {"name": "spo", "ratio_range": 0.4, "ratio_cap": 1.3},
        lambda p, m, a, _: min(p / m * (1 - math.copysign(1, a) * (p / m - 1) / 0.4), 1.3),
    ),
    "ipo": ({"name": "ipo", **LIMIT}, lambda p, m, a, _: 0.0 if abs(p - m) > (HIGH if p > m else LOW) else p / m),
    "grpo": ({"name": "grpo"}, lambda p, m, a, _: clipped(p, m, a)),
    "ppo_clip": (
        {"name": "ppo_clip", "dual_clip": 1.5},
        lambda p, m, a, _: 0.0 if a < 0 and p / m > 1.5 else clipped(p, m, a),
    ),
    "cispo": ({"name": "cispo", "ratio_floor": 0.8, "ratio_cap": 1.2}, lambda p, m, a, _: min(max(p / m, 0.8), 1.2)),
    "pg_is, IcePop": (
        {"name": "pg_is", "mismatch": "mask_token"},
        lambda p, m, a, _: p / m if 0.5 <= p / m <= 2 else 0.0,
    ),
    "sapo": ({"name": "sapo"}, lambda p, m, a, _: sapo(p, m, a)),
    "skyrl/default": (
        {"name": "skyrl/default", **LIMIT},
        lambda p, m, a, _: 0.0 if outward(p, m, a) and abs(p - m) > side(a) else p / m,
    ),
    "score_centering": ({"name": "score_centering"}, lambda p, m, a, _: min(p / m, 2.0)),
    "score_centering, weight 1": ({"name": "score_centering", "centering": "none"}, lambda p, m, a, _: 1.0),
    "score_centering, mask": (
        {"name": "score_centering", "centering": "mask"},
        lambda p, m, a, _: p / m if 0.5 <= p / m <= 2 else 0.0,
    ),
}


def config_of(name: str, **keys: Any) -> LossConfig:
    return LossConfig(**{"centering": True, "topk": V, **RULES[name][0], **keys})


def positions(seed: int, count: int = 40, spread: float = 0.5) -> tuple[Tensor, Tensor]:
    """Logits of pi and probabilities of mu, ``[count, V]``."""
    generator = torch.Generator().manual_seed(seed)
    mu = 1.5 * torch.randn(count, V, generator=generator, dtype=torch.float64)
    return mu + spread * torch.randn(count, V, generator=generator, dtype=torch.float64), mu.softmax(-1)


def every_sample(
    logits: Tensor, mu: Tensor, advantage: float, config: LossConfig, k: int, **columns: Any
) -> tuple[Tensor, Tensor]:
    """The gradient by the logits where each id is the sampled one, ``[positions, id, logit]``, and the keep mask."""
    count = len(logits)
    leaf = logits.repeat_interleave(V, 0).requires_grad_()
    log_p, of_mu = leaf.log_softmax(-1), mu.repeat_interleave(V, 0)
    sampled = torch.arange(V).repeat(count)
    ids = torch.cat([of_mu.sort(dim=-1, descending=True, stable=True).indices[:, :k], sampled[:, None]], -1)
    fields = topk_fields(log_p.detach().exp(), of_mu, sampled, k) | {"topk_logprobs": log_p.gather(-1, ids)}
    inputs = LossInputs(
        logprobs=log_p.gather(-1, sampled[:, None])[:, 0],
        advantages=torch.full((count * V,), advantage, dtype=torch.float64),
        loss_mask=torch.ones(count * V, dtype=torch.bool),
        rollout_logprobs=of_mu.gather(-1, sampled[:, None])[:, 0].log(),
        vocab_size=V,
        **fields,
        **columns,
    )
    output = policy_loss(inputs, config)
    output.loss_sum.backward()
    assert leaf.grad is not None
    return leaf.grad.view(count, V, V), output.keep_mask.view(count, V)


def weights(name: str, logits: Tensor, mu: Tensor, advantage: float) -> Tensor:
    """The rule of each id, ``[positions, V]``."""
    rule = RULES[name][1]
    rows = []
    for pi, at_mu in zip(logits.softmax(-1).tolist(), mu.tolist(), strict=True):
        every = list(zip(pi, at_mu, strict=True))
        rows.append([rule(p, m, advantage, every) for p, m in every])
    return torch.tensor(rows, dtype=torch.float64)


def scores(logits: Tensor) -> Tensor:
    """The gradient of log pi of each id by the logits, ``[positions, id, logit]``."""
    return torch.eye(V, dtype=torch.float64) - logits.softmax(-1)[:, None, :]


@pytest.mark.parametrize("advantage", [1.5, -0.5])
@pytest.mark.parametrize("name", RULES)
def test_the_gradient_of_each_sample_is_its_own_less_the_mean_over_the_sampler(name: str, advantage: float) -> None:
    """And so the mean of the whole update over the sampler is 0, where without centering it is not."""
    logits, mu = positions(1)
    f = weights(name, logits, mu, advantage)
    mean = (mu * f)[:, None, :] @ scores(logits)
    want = -advantage * (f[:, :, None] * scores(logits) - mean)
    got, _ = every_sample(logits, mu, advantage, config_of(name), V)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    expectation = (mu[:, None, :] @ got).abs().max()
    assert float(expectation) < 1e-12, f"mean of the update over the sampler: {float(expectation):.1e}"
    without = config_of(name).model_copy(update={"centering": False})
    bare, _ = every_sample(logits, mu, advantage, without, V)
    assert float((mu[:, None, :] @ bare).abs().max()) > 1e-2


@pytest.mark.parametrize("name", RULES)
def test_the_gradient_is_the_finite_difference_of_the_centered_objective(name: str) -> None:
    """Return the gradient of ``- A (f_k log pi_k - sum_v mu_v f_v log pi_v)`` by each logit, for fixed weights f."""
    logits, mu = positions(2, 6)
    f, step = weights(name, logits, mu, 1.0), 1e-6
    got, _ = every_sample(logits, mu, 1.0, config_of(name), V)

    def objective(moved: Tensor) -> Tensor:
        log_p = moved.log_softmax(-1)
        return -(f * log_p - (mu * f * log_p).sum(-1, keepdim=True))

    for logit in range(V):
        move = step * torch.nn.functional.one_hot(torch.tensor(logit), V)
        slope = (objective(logits + move) - objective(logits - move)) / (2 * step)
        torch.testing.assert_close(got[:, :, logit], slope, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("name", [name for name in RULES if "topk" not in name])
def test_outside_the_head_a_proportional_tail_of_rare_ids_leaves_nothing(name: str, k: int) -> None:
    """mu = rho pi outside of TopK(mu, k), no id of the tail near a threshold: still exact.

    The weight of DRPO falls with every move of probability, so its tail is off by that move over delta.
    """
    logits, mu = positions(3)
    order = mu.sort(dim=-1, descending=True, stable=True)
    tail = torch.zeros_like(mu, dtype=torch.bool).scatter(-1, order.indices[:, k:], True)
    mu = torch.where(tail, 1e-3 * mu, mu)
    mu = mu / mu.sum(-1, keepdim=True)
    logits = torch.where(tail, mu.log() + 0.4, (mu.log() + logits) / 2)
    known = mu.where(tail, 0.0).sum(-1) > 1e-5  # a smaller mass is rounded up to 1e-6
    assert int(known.sum()) > 20
    logits, mu = logits[known], mu[known]
    got, _ = every_sample(logits, mu, 1.0, config_of(name, topk=k), k)
    assert float((mu[:, None, :] @ got).abs().max()) < (1e-4 if name == "drpo" else 1e-9)


@pytest.mark.parametrize("name", ["dppo_binary_tv", "dppo_topk_kl predictive", "grpo"])
def test_on_policy_with_weight_1_the_term_is_zero(name: str) -> None:
    _, mu = positions(4)
    config = config_of(name, topk=3)
    keys = {key: value for key, value in RULES[name][0].items()}
    plain = LossConfig(**keys, **({"topk": 3} if "topk" in name else {}))
    got, want = (every_sample(mu.log(), mu, 1.0, each, 3)[0] for each in (config, plain))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["dppo_binary_tv", "dppo_topk_kl predictive", "drpo", "grpo"])
@pytest.mark.parametrize("size", [2, 4])
def test_kept_sets_of_a_filter_are_exact_in_the_fused_head(name: str, size: int) -> None:
    """Each position allows ``size`` of 50 ids, each is sampled once; K = 4 holds them all, and nothing is left over."""
    generator = torch.Generator().manual_seed(5)
    count, wide, k = 30, 50, 4
    logits = torch.randn(count, wide, generator=generator, dtype=torch.float64)
    kept = torch.stack([torch.randperm(wide, generator=generator)[:size] for _ in range(count)])
    mu = (logits.gather(1, kept) + 0.7 * torch.randn(count, size, generator=generator, dtype=torch.float64)).softmax(-1)
    mu, order = mu.sort(dim=-1, descending=True)
    kept = kept.gather(1, order)
    rows = torch.arange(count).repeat_interleave(size)
    chosen = torch.arange(size).repeat(count)
    slots = torch.full((count * size, k + 1), -1, dtype=torch.int32)
    slots[:, :size] = kept[rows].int()
    at_slots = torch.zeros(count * size, k + 1, dtype=torch.float64)
    at_slots[:, :size] = mu[rows].log()
    at_slots[:, k] = mu[rows, chosen].log()
    targets = TokenTargets(
        labels=kept[rows, chosen],
        # The expectation under mu: each sample counts with its own probability.
        advantages=mu[rows, chosen],
        loss_mask=torch.ones(len(rows), dtype=torch.bool),
        rollout_logprobs=mu[rows, chosen].log(),
        rollout_topk_ids=slots,
        rollout_topk_logprobs=at_slots,
        sampling_mask=SamplingMask(kept[rows].flatten().int(), torch.full((len(rows),), size, dtype=torch.int32)),
    )
    remaining = {}
    for centering in (True, False):
        keys = {**RULES[name][0], "centering": centering} | ({"topk": k} if centering or "topk" in name else {})
        objective = policy_objective(LossConfig(**keys))
        hidden = logits[rows].clone().requires_grad_()
        output = dppo_head_loss(
            hidden,
            torch.eye(wide, dtype=torch.float64),
            targets,
            objective.loss,
            group=None,
            vocab_size=wide,
            needs=objective.needs,
        )
        output.loss_sum.backward()
        remaining[centering] = float(hidden.grad.view(count, size, wide).sum(1).abs().max())
    assert remaining[True] < 1e-12 and remaining[False] > 1e-2, remaining


def test_a_masked_sample_still_has_the_centering_of_its_position() -> None:
    logits, mu = positions(6)
    got, keep = every_sample(logits, mu, 1.0, config_of("dppo_binary_tv"), V)
    assert 0 < int((~keep).sum()) < keep.numel()
    assert float(got[~keep].abs().amax(-1).min()) > 0


def test_masks_of_whole_sequences_and_of_users_take_the_position_out() -> None:
    logits, mu = positions(7, 1)
    config = config_of("dppo_binary_tv", mismatch="mask_sequence", mismatch_low=0.99, mismatch_high=1.01)
    leaf = logits.clone().requires_grad_()
    log_p = leaf.log_softmax(-1)
    ids = mu.sort(dim=-1, descending=True, stable=True).indices
    sampled = ids[:, 0]
    fields = topk_fields(log_p.detach().exp(), mu, sampled, V)
    fields["topk_logprobs"] = log_p.gather(-1, torch.cat([ids, sampled[:, None]], -1))
    inputs = LossInputs(
        logprobs=log_p.gather(-1, sampled[:, None])[:, 0],
        advantages=torch.ones(1, dtype=torch.float64),
        loss_mask=torch.tensor([True]),
        rollout_logprobs=mu.gather(-1, sampled[:, None])[:, 0].log(),
        sequence_ids=torch.zeros(1, dtype=torch.int64),
        **fields,
    )
    policy_loss(inputs, config).loss_sum.backward(retain_graph=True)
    assert leaf.grad is not None and float(leaf.grad.abs().max()) == 0.0
    outside = replace(inputs, loss_mask=torch.tensor([False]))
    policy_loss(outside, config_of("dppo_binary_tv")).loss_sum.backward(retain_graph=True)
    assert float(leaf.grad.abs().max()) == 0.0
    policy_loss(inputs, config_of("dppo_binary_tv")).loss_sum.backward()
    assert float(leaf.grad.abs().max()) > 0.0


def test_losses_that_can_center_do_and_others_say_why_not() -> None:
    centered = {keys["name"] for keys, _ in RULES.values() if "/" not in keys["name"]} - {"score_centering"}
    for name in loss_classes():
        if name in centered or name == "dppo_topk_kl":
            assert LossConfig(name=name, centering=True).is_topk
        else:
            with pytest.raises(ValueError, match="centering = true"):
                LossConfig(name=name, centering=True)


def test_recorded_configurations_with_the_name_of_a_weight_still_load() -> None:
    assert LossConfig(name="dppo_binary_tv", centering="truncate") == LossConfig(name="dppo_binary_tv")
    assert LossConfig(name="score_centering", centering="truncate") == LossConfig(name="score_centering")
    with pytest.raises(ValueError, match="valid boolean"):
        LossConfig(name="dppo_binary_tv", centering="mask")
