"""A made-up loss that reads numbers of its step and of its update: which tokens they are of, and when."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_dppo as md
from megatron_dppo.config.loss import LossConfig
from megatron_dppo.config.train import TrainConfig
from megatron_dppo.errors import FunctionError
from megatron_dppo.losses import BatchTokens, Decision, Loss, Tokens, batch_statistics, policy_loss, weigh_by_ratio
from megatron_dppo.losses.user_check import check_user_functions
from megatron_dppo.policy import update
from megatron_dppo.report.clock import Clock
from megatron_dppo.types import LossInputs, TrainingSample

MU = -3.0


class Bounded(Loss):
    """The weight is r over the largest r of the update; tokens above the mean |A| of the step are masked."""

    def step_statistics(self) -> Mapping[str, Callable[..., float]]:
        return {**super().step_statistics(), "mean_signal": lambda tokens: tokens.advantages.abs().mean()}

    def update_statistics(self) -> Mapping[str, Callable[..., float]]:
        return {**super().update_statistics(), "largest_ratio": largest_ratio}

    def decide(self, tokens: Tokens) -> Decision:
        decision = weigh_by_ratio(tokens, tokens.ratio, tokens.advantages.abs() <= tokens.statistic("mean_signal"))
        return decision._replace(weight=decision.weight / tokens.statistic("largest_ratio"))


def largest_ratio(tokens: BatchTokens) -> float:
    return float(tokens.log_ratio.max().exp())


def sample(number: int) -> TrainingSample:
    """One token in the loss, one of the prompt, and one without a finite log mu."""
    return TrainingSample(
        tokens=torch.zeros(3, dtype=torch.int64),
        labels=torch.zeros(3, dtype=torch.int64),
        loss_mask=torch.tensor([True, False, True]),
        advantages=torch.tensor([number + 1.0, 50.0, 50.0]),
        rollout_logprobs=torch.tensor([MU, MU, -math.inf]),
        number=number,
    )


class Training:
    """Two updates on this rank's samples 0, 1 and 2, 3; log r of sample i is (i + 1) / 10, after an update twice that.

    Another rank has a token with log r = .35 and A = 6 in every pass.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, loss: LossConfig, split: list[list[int]]) -> None:
        self.updates = 0
        self.passes: list[tuple[int, list[int]]] = []
        self.outputs: list[LossInputs] = []
        trainer = SimpleNamespace(groups=SimpleNamespace(dp="the group"), policy_version=0)
        trainer.accumulate = self.accumulate
        trainer.apply = self.apply
        self.split = split
        self.updater = update.Updater(trainer, TrainConfig(mini_batches=2), loss)  # type: ignore[arg-type]
        self.gradients: list[Tensor] = []
        monkeypatch.setattr(self.updater, "_recompute", self.recompute)
        monkeypatch.setattr(self.updater, "_pack", self.pack)
        monkeypatch.setattr(self.updater, "_add_token_weights", lambda packed: packed.batches)
        monkeypatch.setattr(update, "all_gather_objects", self.gather)

    def moved(self, number: int) -> float:
        return (number + 1) * (1 + self.updates) / 10

    def recompute(self, samples: list[TrainingSample], *_: object, **__: object) -> list[TrainingSample]:
        self.passes.append((self.updates, [each.number for each in samples]))
        columns = [torch.tensor([MU + self.moved(each.number), 0.0, 0.0]) for each in samples]
        return [replace(each, recomputed_logprobs=column) for each, column in zip(samples, columns, strict=True)]

    def gather(self, local: Tensor, group: object) -> list[Tensor]:
        assert group == "the group"
        return [local, torch.tensor([[MU + 0.35], [MU], [6.0]])]

    def pack(self, samples: list[TrainingSample]) -> tuple[list[TrainingSample], object]:
        return samples, SimpleNamespace(totals=SimpleNamespace(num_tokens=1), batches=samples)

    def accumulate(self, samples: list[TrainingSample], objective: Any, *_: object) -> dict[str, float]:
        logprobs = torch.tensor([MU + self.moved(each.number) for each in samples], dtype=torch.float64)
        inputs = LossInputs(
            logprobs=logprobs.requires_grad_(),
            rollout_logprobs=torch.full_like(logprobs, MU),
            advantages=torch.stack([each.advantages[0] for each in samples]).double(),
            loss_mask=torch.ones(len(samples), dtype=torch.bool),
        )
        objective.loss(inputs).loss_sum.backward()
        assert inputs.logprobs.grad is not None
        self.gradients.append(inputs.logprobs.grad)
        return {}

    def apply(self, metrics: object) -> int:
        self.updates += 1
        return self.updates

    def run(self) -> None:
        list(self.updater.run([sample(n) for n in range(4)], 0, Clock(), split=lambda epoch: self.split))


def test_each_number_is_that_of_its_step_or_update_over_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch, Bounded(name="bounded.py:Bounded"), [[0, 1], [2, 3]])
    training.run()
    # The step once with the first weights, each update with its own. Nothing else takes a forward pass.
    assert training.passes == [(0, [0, 1, 2, 3]), (0, [0, 1]), (1, [2, 3])]
    # Mean |A| of 1, 2, 3, 4 and 6: 3.2. Largest log r: .1, .2 and .35 of the other rank; then .6, .8 and .35.
    first, second = training.gradients
    assert first.tolist() == pytest.approx([-1 * math.exp(0.1 - 0.35), -2 * math.exp(0.2 - 0.35)], rel=1e-6)
    assert second.tolist() == pytest.approx([-3 * math.exp(0.6 - 0.8), 0.0], rel=1e-6)


def test_a_loss_without_statistics_takes_no_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch, LossConfig(), [[0, 1], [2, 3]])
    training.run()
    assert not training.passes and len(training.gradients) == 2


def test_a_batch_without_tokens_has_no_numbers_and_calls_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A maximum of nothing would raise on the pipeline stages without a loss."""
    training = Training(monkeypatch, Bounded(name="bounded.py:Bounded"), [[0], [1]])
    monkeypatch.setattr(update, "all_gather_objects", lambda local, group: [local])
    outside = [sample(n).without_loss() for n in range(2)]
    assert training.updater.objective(outside).loss is not None


def test_in_a_trainer_of_another_the_call_is_the_batch() -> None:
    inputs = LossInputs(
        logprobs=torch.tensor([0.5, 0.9, 0.2], dtype=torch.float64).log().requires_grad_(),
        rollout_logprobs=torch.tensor([0.4, 0.5, 0.4], dtype=torch.float64).log(),
        advantages=torch.tensor([1.0, -2.0, 1.0], dtype=torch.float64),
        loss_mask=torch.tensor([True, True, False]),
    )
    loss = Bounded(name="bounded.py:Bounded")
    with pytest.raises(ValueError, match=r"statistics\['mean_signal'\]"):
        policy_loss(inputs, loss)
    numbers = batch_statistics(inputs, loss)
    assert numbers == {"mean_signal": 1.5, "largest_ratio": pytest.approx(1.8)}
    md.policy_loss(replace(inputs, statistics=numbers), loss).loss_sum.backward()
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad.tolist() == pytest.approx([-1.25 / 1.8, 0.0, 0.0])


@pytest.mark.parametrize(
    ("statistic", "problem"),
    [("lambda tokens: tokens.nothing", "AttributeError.*nothing"), ("lambda tokens: tokens.advantages", "")],
)
def test_a_statistic_that_is_no_number_stops_the_run_before_it_starts(
    statistic: str, problem: str, tmp_path: Path
) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(
        "from megatron_dppo import losses\n\n\nclass Wrong(losses.Loss):\n"
        f"    def update_statistics(self):\n        return {{'x': {statistic}}}\n\n"
        "    def decide(self, tokens):\n        return losses.weigh_by_ratio(tokens, tokens.ratio)\n"
    )
    with pytest.raises(FunctionError, match=rf"loss\.name = .*Wrong' raised .*{problem}"):
        check_user_functions(LossConfig(name=f"{file}:Wrong"))
