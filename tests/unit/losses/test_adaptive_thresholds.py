"""Thresholds by age and by mismatch, token by token in plain arithmetic, and where their inputs come from."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.config.train import TrainConfig
from megatron_dppo.losses import adapted_limits, policy_loss
from megatron_dppo.losses.tokens import prepare
from megatron_dppo.policy import update
from megatron_dppo.types import LossInputs, TrainingSample, VersionSpan, token_ages

COUNT, SCALE = 400, 0.3
KEYS: dict[str, dict[str, Any]] = {
    "age": {"threshold_age": 2.0},
    "knee": {"threshold_knee": 0.5, "threshold_floor": 0.4},
    "both": {"threshold_age": 4.0, "threshold_knee": 1.0},
}
LOSSES = ("dppo_binary_tv", "dppo_binary_kl", "grpo", "ppo_clip")


def tokens() -> LossInputs:
    generator = torch.Generator().manual_seed(3)
    log_mu = torch.rand(COUNT, generator=generator, dtype=torch.float64).log()
    moved = 0.5 * torch.randn(COUNT, generator=generator, dtype=torch.float64)
    return LossInputs(
        logprobs=(log_mu + moved).clamp(max=-1e-3).requires_grad_(),
        rollout_logprobs=log_mu,
        advantages=torch.randn(COUNT, generator=generator, dtype=torch.float64),
        loss_mask=torch.rand(COUNT, generator=generator) < 0.9,
        ages=torch.randint(0, 6, (COUNT,), generator=generator).float(),
        statistics={"mismatch_scale": SCALE},
    )


def is_kept(name: str, keys: dict[str, Any], p: float, m: float, advantage: float, age: float) -> bool:
    factor = 1.0
    if "threshold_age" in keys:
        factor /= 1 + age / keys["threshold_age"]
    if "threshold_knee" in keys:
        u = abs(math.log(p / m)) / SCALE
        if u > keys["threshold_knee"]:
            factor *= max(keys.get("threshold_floor", 0.25), keys["threshold_knee"] / u)
    if name.startswith("dppo"):
        moved, limit = abs(p - m), 0.15 * factor
        if name.endswith("kl"):
            moved = m * math.log(m / p) + (1 - m) * math.log((1 - m) / (1 - p))
            limit = 0.05 * factor
        return advantage * (p - m) <= 0 or moved <= limit
    return p / m <= 1 + 0.28 * factor if advantage > 0 else p / m >= 1 - 0.2 * factor


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("name", LOSSES)
def test_the_mask_is_that_of_the_contracted_thresholds(name: str, keys: dict[str, Any]) -> None:
    inputs = tokens()
    assert inputs.rollout_logprobs is not None and inputs.ages is not None
    output = policy_loss(inputs, LossConfig(name=name, **keys))
    columns = (inputs.logprobs.exp(), inputs.rollout_logprobs.exp(), inputs.advantages, inputs.ages)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    want = torch.tensor([is_kept(name, keys, *row) for row in rows]) & inputs.loss_mask
    assert torch.equal(output.keep_mask, want)
    nominal = policy_loss(inputs, LossConfig(name=name)).keep_mask
    assert not (want & ~nominal).any(), "inside the nominal trust region"
    assert (nominal & ~want).sum() > 5, "and smaller"


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
def test_ppo_with_contracted_endpoints_is_pessimistic_at_every_token(keys: dict[str, Any]) -> None:
    inputs = tokens()

    def terms(config: LossConfig) -> Tensor:
        each = [
            replace(inputs, **{k: v[t : t + 1] for k, v in vars(inputs).items() if isinstance(v, Tensor)})
            for t in range(60)
        ]
        return torch.stack([policy_loss(one, config).loss_sum.detach() for one in each])

    contracted, nominal = terms(LossConfig(name="ppo_clip", **keys)), terms(LossConfig(name="ppo_clip"))
    assert (contracted >= nominal - 1e-12).all() and (contracted > nominal + 1e-6).any()


def test_tokens_within_the_knee_and_fresh_tokens_keep_their_thresholds() -> None:
    inputs = replace(tokens(), ages=torch.zeros(COUNT))
    for name in LOSSES:
        keys = {"threshold_age": 1.0, "threshold_knee": 1e9}
        a, b = policy_loss(inputs, LossConfig(name=name, **keys)), policy_loss(inputs, LossConfig(name=name))
        assert torch.equal(a.loss_sum, b.loss_sum) and torch.equal(a.keep_mask, b.keep_mask)


@pytest.mark.parametrize("scale", [0.0, 1e-7, 1e-6, 1e-5, 1e-3, 1e-2, 0.3])
def test_the_knee_is_in_units_of_the_scale_however_small_it_is(scale: float) -> None:
    """Real scales are 1e-3 to 1e-2. Below 1e-6 pi and mu differ by rounding, and the unit stays 1e-6."""
    moved = [factor * max(scale, 1e-6) for factor in (-9.0, -2.1, 0.0, 0.5, 1.9, 2.1, 3.0, 100.0)]
    log_mu = torch.full((len(moved),), -1.0, dtype=torch.float64)
    inputs = LossInputs(
        logprobs=log_mu + torch.tensor(moved, dtype=torch.float64),
        rollout_logprobs=log_mu,
        advantages=torch.ones(len(moved)),
        loss_mask=torch.ones(len(moved), dtype=torch.bool),
        statistics={"mismatch_scale": scale},
    )
    config = LossConfig(threshold_knee=2.0, threshold_floor=0.3)
    limits = adapted_limits((0.1, 0.2), prepare(inputs, config), config)  # type: ignore[arg-type]
    factors = [max(0.3, min(1.0, 2.0 / f)) for f in (9.0, 2.1, 1e-9, 0.5, 1.9, 2.1, 3.0, 100.0)]
    for limit, column in zip((0.1, 0.2), limits, strict=True):
        assert isinstance(column, Tensor)
        assert column.tolist() == pytest.approx([limit * factor for factor in factors], rel=1e-6)


def test_missing_inputs_are_named_with_their_key() -> None:
    with pytest.raises(ValueError, match=r"loss\.threshold_age"):
        policy_loss(replace(tokens(), ages=None), LossConfig(threshold_age=1.0))
    with pytest.raises(ValueError, match=r"needs statistics\['mismatch_scale'\].*losses\.batch_statistics"):
        policy_loss(replace(tokens(), statistics={}), LossConfig(threshold_knee=2.0))
    with pytest.raises(ValueError, match=r"threshold_floor = 0.5 has no effect"):
        LossConfig(threshold_floor=0.5)
    with pytest.raises(ValueError, match=r"threshold_age = 1.0"):
        LossConfig(name="pg_is", threshold_age=1.0)


def sample(logprobs: list[float], mask: list[bool], *sources: VersionSpan) -> TrainingSample:
    count = len(logprobs)
    return TrainingSample(
        tokens=torch.zeros(count, dtype=torch.int64),
        labels=torch.zeros(count, dtype=torch.int64),
        loss_mask=torch.tensor(mask),
        advantages=torch.ones(count),
        rollout_logprobs=torch.tensor(logprobs),
        sources=sources,
    )


def test_the_age_of_a_token_counts_the_updates_since_its_weights() -> None:
    spans = (VersionSpan(3, 1, 2), VersionSpan(5, 2, 4))
    assert token_ages(spans, 4, 7).tolist() == [0.0, 4.0, 2.0, 2.0]
    assert token_ages((), 2, 7).tolist() == [0.0, 0.0]
    # The first token of a sequence is no label: a span that begins with it begins at label 0.
    assert token_ages((VersionSpan(3, -1, 2), VersionSpan(5, 2, 4)), 4, 7).tolist() == [4.0, 4.0, 2.0, 2.0]
    assert token_ages((VersionSpan(3, -1, 4),), 4, 7).tolist() == [4.0] * 4


def test_the_scale_is_the_median_over_the_loss_tokens_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mismatches .1, .5 here (9 and 9 are prompt tokens) and .2, .4, .3 on the other rank: the median is .3."""
    samples = [sample([-1.0, -1.0, -1.0], [True, False, False]), sample([-1.0], [True])]
    moved = [torch.tensor([-1.1, 8.0, 8.0]), torch.tensor([-0.5])]
    trainer = SimpleNamespace(groups=SimpleNamespace(dp="the group"), routing_shape=None)
    updater = update.Updater(trainer, TrainConfig(), LossConfig(threshold_knee=2.0))  # type: ignore[arg-type]
    monkeypatch.setattr(
        updater,
        "_recompute",
        lambda given, *_, **__: [replace(s, recomputed_logprobs=m) for s, m in zip(given, moved, strict=True)],
    )

    def gather(local: Tensor, group: object) -> list[Tensor]:
        assert group == "the group"
        # Log pi, log mu and A of the other rank.
        return [local, torch.tensor([[-0.8, -1.4, -1.3], [-1.0, -1.0, -1.0], [0.0, 0.0, 0.0]])]

    monkeypatch.setattr(update, "all_gather_objects", gather)
    monkeypatch.setattr(update, "policy_objective", lambda loss, *, statistics: statistics)
    assert updater.objective(samples) == {"mismatch_scale": pytest.approx(0.3)}  # type: ignore[comparison-overlap]
