"""M2PO: the limit against the removal of one token after the other, ties, infinities, and the tokens of all ranks."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.config.train import TrainConfig
from megatron_dppo.errors import ConfigError
from megatron_dppo.losses import BatchTokens, policy_loss
from megatron_dppo.losses.m2po import M2PO, largest_square
from megatron_dppo.policy import update
from megatron_dppo.report.clock import Clock
from megatron_dppo.types import LossInputs, TrainingSample
from tests.unit.configs import config


def removed_one_by_one(squares: list[float], limit: float) -> list[float]:
    """The squares that are left, in order."""
    left = sorted(squares)
    while left and sum(left) / len(left) > limit:
        left.pop()
    return left


@pytest.mark.parametrize("seed", range(20))
def test_the_limit_leaves_what_removing_the_largest_one_by_one_leaves(seed: int) -> None:
    draw = random.Random(seed)
    squares = [draw.gauss(0, draw.choice((0.05, 0.3, 1.0))) ** 2 for _ in range(draw.randrange(1, 60))]
    limit = draw.choice((0.001, 0.04, 0.3))
    cut = largest_square(torch.tensor(squares, dtype=torch.float64), limit)
    assert sorted(x for x in squares if x <= cut) == removed_one_by_one(squares, limit)
    # Both neighbors are as far away, so that another rounding of the same numbers decides the same.
    for factor in (1 - 1e-6, 1 + 1e-6):
        assert [x * factor <= cut for x in squares] == [x <= cut for x in squares]


@pytest.mark.parametrize(
    ("squares", "limit", "remaining"),
    [
        ([], 0.04, []),
        ([0.0, 0.0], 0.04, [0.0, 0.0]),
        ([0.05, 0.05], 0.04, []),
        ([0.0, 0.06, 0.06, 0.06], 0.035, [0.0]),  # two of the three equal ones would fit; they go together
        ([0.01, 6400.0], 0.04, [0.01]),
    ],
)
def test_edges(squares: list[float], limit: float, remaining: list[float]) -> None:
    cut = largest_square(torch.tensor(squares), limit)
    assert [x for x in squares if x <= cut] == remaining


def test_the_mask_and_the_gradient_by_hand() -> None:
    """A usual token, an outlier upwards, one that leads back, one downwards to pi = 0, and one without advantage."""
    pi = [0.5, 0.9, 0.9, 0.0, 0.9]
    inputs = LossInputs(
        logprobs=torch.tensor(pi, dtype=torch.float64).log().requires_grad_(),
        rollout_logprobs=torch.tensor([0.4, 0.5, 0.5, 0.3, 0.5], dtype=torch.float64).log(),
        advantages=torch.tensor([1.0, 2.0, -1.0, -1.0, 0.0], dtype=torch.float64),
        loss_mask=torch.ones(5, dtype=torch.bool),
        statistics={"largest_square": 0.2},
    )
    output = policy_loss(inputs, LossConfig(name="m2po"))
    assert output.keep_mask.tolist() == [True, False, True, False, True]
    output.loss_sum.backward()
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad.tolist() == pytest.approx([-1.25, 0.0, 1.8, 0.0, 0.0])
    assert float(output.num_tokens) == 5, "masked tokens stay in the denominator"
    everywhere = policy_loss(inputs, LossConfig(name="m2po", second_moment_tokens="all"))
    assert everywhere.keep_mask.tolist() == [True, False, False, False, False]


@pytest.mark.parametrize("quiet", [(0.0, 1.0), (0.0, -1.0), (0.3, 0.0), (-0.3, 0.0), (0.3, -1.0), (-0.3, 1.0)])
def test_tokens_that_lead_nowhere_do_not_lower_the_moment(quiet: tuple[float, float]) -> None:
    """Log r and A of ten tokens that have not moved, have no advantage, or lead back: two others decide alone."""
    log_ratio = torch.tensor([0.1, -0.5, *[quiet[0]] * 10])
    advantages = torch.tensor([1.0, -1.0, *[quiet[1]] * 10])
    batch = BatchTokens(log_ratio - 1, torch.full((12,), -1.0), advantages)
    # The squares are .01 and .25, and the mean of both is 0.13; among twelve it would be below the limit.
    assert M2PO(second_moment_limit=0.05).largest_square(batch) == pytest.approx(0.13)
    assert M2PO(second_moment_limit=0.2, second_moment_tokens="all").largest_square(batch) == math.inf


def test_each_mini_batch_has_a_moment_of_its_own_by_the_weights_of_its_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two mini-batches, and the first update moves pi: log r of sample i is (i + 1) / 10, then 1.5 times that."""
    trainer = SimpleNamespace(
        groups=SimpleNamespace(dp=None), updates=0, accumulate=lambda *_: {}, policy_version=0, is_last_stage=True
    )
    updater = update.Updater(trainer, TrainConfig(mini_batches=2), LossConfig(name="m2po"))  # type: ignore[arg-type]

    def sample(number: int) -> TrainingSample:
        return TrainingSample(
            tokens=torch.zeros(1, dtype=torch.int64),
            labels=torch.zeros(1, dtype=torch.int64),
            loss_mask=torch.tensor([True]),
            advantages=torch.tensor([1.0]),
            rollout_logprobs=torch.tensor([-3.0]),
            number=number,
        )

    def recompute(samples: list[TrainingSample], *_: object, **__: object) -> list[TrainingSample]:
        moved = [(each.number + 1) * (1 + trainer.updates / 2) / 10 for each in samples]
        return [
            replace(each, recomputed_logprobs=torch.tensor([-3.0 + m])) for each, m in zip(samples, moved, strict=True)
        ]

    def apply(metrics: object) -> int:
        trainer.updates += 1
        return trainer.updates

    trainer.apply = apply
    limits: list[float] = []

    def objective(loss: object, *, counterfactuals: bool, statistics: dict[str, float]) -> None:
        assert counterfactuals == (len(limits) == 1)
        limits.append(round(statistics["largest_square"], 6))

    def pack(samples: list[TrainingSample]) -> tuple[list[TrainingSample], object]:
        return samples, SimpleNamespace(totals=SimpleNamespace(num_tokens=1), batches=[])

    monkeypatch.setattr(updater, "_recompute", recompute)
    monkeypatch.setattr(updater, "_pack", pack)
    monkeypatch.setattr(update, "policy_objective", objective)
    monkeypatch.setattr(updater, "_add_token_weights", lambda packed: packed.batches)
    monkeypatch.setattr(update, "all_gather_objects", lambda local, group: [local])
    split = [[0, 1, 2], [0, 1, 3]]
    assert list(updater.run([sample(n) for n in range(4)], 0, Clock(), split=lambda epoch: split)) == [1, 2]
    # Squares .01, .04, .09 (means .01, .025, .047), and .0225, .09, .36 (means .0225, .056).
    assert limits == [0.065, 0.05625]


@pytest.mark.parametrize(("tokens", "between"), [("outward", (0.04 + 0.3) / 2), ("all", (0.1 + 0.3) / 2)])
def test_the_moment_is_that_of_the_loss_tokens_of_all_ranks(
    tokens: str, between: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Squares here: outward .04, a prompt token, no finite log mu, inward .5; on the other rank .3 and inward .1."""
    shape = {"tokens": torch.zeros(4, dtype=torch.int64), "labels": torch.zeros(4, dtype=torch.int64)}
    sample = TrainingSample(
        **shape,
        loss_mask=torch.tensor([True, False, True, True]),
        advantages=torch.tensor([1.0, 1.0, 1.0, -1.0]),
        rollout_logprobs=torch.tensor([-1.0, -1.0, -math.inf, -1.0]),
    )
    moved = torch.tensor([-0.8, 7.0, -1.0, -1.0 + math.sqrt(0.5)])
    trainer = SimpleNamespace(groups=SimpleNamespace(dp="the group"), routing_shape=None)
    loss = LossConfig(name="m2po", second_moment_tokens=tokens, second_moment_limit=0.1)
    updater = update.Updater(trainer, TrainConfig(), loss)  # type: ignore[arg-type]
    monkeypatch.setattr(updater, "_recompute", lambda given, *_, **__: [replace(given[0], recomputed_logprobs=moved)])

    def gather(local: Tensor, group: object) -> list[Tensor]:
        assert group == "the group"
        # Log pi, log mu and A of the other rank: an outward and an inward token.
        return [local, torch.tensor([[-1 + math.sqrt(0.3), -1 - math.sqrt(0.1)], [-1.0, -1.0], [1.0, 1.0]])]

    monkeypatch.setattr(update, "all_gather_objects", gather)
    monkeypatch.setattr(update, "policy_objective", lambda loss, *, statistics: statistics)
    # Means of the smallest: .04, .17 | .04, .07, .147, .235.
    assert updater.objective([sample]) == {"largest_square": pytest.approx(between)}  # type: ignore[comparison-overlap]


def test_it_refuses_noise_and_a_missing_moment() -> None:
    with pytest.raises(ConfigError, match=r"m2po.*layer_noise\.std = 0.1"):
        config(loss={"name": "m2po"}, train={"layer_noise": {"std": 0.1}})
    zeros = torch.zeros(1)
    inputs = LossInputs(logprobs=zeros, rollout_logprobs=zeros, advantages=zeros, loss_mask=zeros.bool())
    with pytest.raises(ValueError, match=r"statistics\['largest_square'\]"):
        policy_loss(inputs, LossConfig(name="m2po"))
