"""The KL penalty in the reward and its metric on one rank, token by token in plain arithmetic."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron_dppo.config.reward import RewardConfig
from megatron_dppo.config.train import TrainConfig
from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.run import step
from megatron_dppo.run.step import compute_kl_metrics, compute_kl_penalty, make_samples, refine_advantages
from megatron_dppo.types import Completion, FinishReason, Prompt, Rollout, RolloutGroup, TrainingSample

MU = [[-0.5, -1.0, -2.0], [-0.1], [-3.0, -0.2], [-0.7, -0.7, -0.7, -0.7]]
REFERENCE = [[-1.5, -0.5, -2.0], [-0.4], [-1.0, -0.9], [-30.0, -0.1, -0.7, -2.0]]
MASK = [[True, False, True], [True], [False, False], [True, True, True, False]]
REWARDS = [1.0, 0.0, 0.5, 2.0]
COEFFICIENT = 0.3


def kl(mu: float, reference: float, estimator: str) -> float:
    """Return the penalty of a token that mu sampled; a log ratio counts up to 20."""
    ratio = max(-20.0, min(20.0, mu - reference))
    return {"k1": ratio, "k2": ratio**2 / 2, "k3": math.exp(-ratio) - 1 + ratio}[estimator]


def penalties(estimator: str) -> list[list[float]]:
    return [
        [COEFFICIENT * kl(m, r, estimator) if inside else 0.0 for m, r, inside in zip(*columns, strict=True)]
        for columns in zip(MU, REFERENCE, MASK, strict=True)
    ]


def rollouts() -> RolloutGroup:
    """Four siblings, of which the third has no token in the loss."""
    prompt = Prompt(prompt_id="p", text="", token_ids=(1, 2), label="")
    return RolloutGroup(
        prompt=prompt,
        rollouts=tuple(
            Rollout(
                prompt=prompt,
                completion=Completion(
                    token_ids=torch.zeros(len(mu), dtype=torch.int32),
                    logprobs=torch.tensor(mu),
                    finish_reason=FinishReason.STOP,
                    policy_version=0,
                    text="",
                    loss_mask=torch.tensor(mask),
                ),
                reward=reward,
            )
            for mu, mask, reward in zip(MU, MASK, REWARDS, strict=True)
        ),
    )


def with_reference(samples: list[TrainingSample]) -> list[TrainingSample]:
    """The reference's numbers at the response's labels; the prompt's label has another one that must not count."""
    return [
        TrainingSample(**{**vars(sample), "reference_logprobs": torch.tensor([-9.0, *reference])})
        for sample, reference in zip(samples, REFERENCE, strict=True)
    ]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("advantage", ["none", "mean", "leave_one_out"])
def test_advantages_with_a_penalty_are_those_by_hand(
    advantage: Any, estimator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, reward = TrainConfig(advantage=advantage), RewardConfig(kl_coef=COEFFICIENT, kl_estimator=estimator)
    groups = [rollouts()]
    samples = with_reference(make_samples(groups, train, reward))
    given = penalties(estimator)
    for sample, row in zip(samples, given, strict=True):
        assert compute_kl_penalty(sample, reward).tolist() == pytest.approx([0.0, *row], rel=1e-5)
    refined = refine_advantages(samples, groups, train, reward, group=None)
    scores = [r - sum(row) for r, row in zip(REWARDS, given, strict=True)]
    for index, (sample, mask) in enumerate(zip(refined, MASK, strict=True)):
        if advantage == "none":
            wanted = [REWARDS[index] - sum(given[index][t:]) for t in range(len(mask))]
        else:
            others = scores if advantage == "mean" else scores[:index] + scores[index + 1 :]
            wanted = [scores[index] - sum(others) / len(others)] * len(mask)
        wanted = [value if inside else 0.0 for value, inside in zip(wanted, mask, strict=True)]
        assert sample.advantages.tolist() == pytest.approx([0.0, *wanted], rel=1e-4, abs=1e-5)

    # The metric is the mean over the tokens of the loss, without the coefficient.
    monkeypatch.setattr(step.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(step, "reduce_metrics", lambda local, group, contributes: local[0])
    count = sum(map(sum, MASK))
    metrics = compute_kl_metrics(samples, reward, ParallelGroups())
    total, tokens, _ = metrics["kl_in_reward"]  # type: ignore[misc]
    assert (total, tokens) == (pytest.approx(sum(map(sum, given)) / COEFFICIENT, rel=1e-5), count)


def test_a_stage_without_the_reference_has_no_penalty() -> None:
    reward = RewardConfig(kl_coef=COEFFICIENT)
    samples = make_samples([rollouts()], TrainConfig(), reward)
    assert [compute_kl_penalty(sample, reward).tolist() for sample in samples] == [[0.0] * (len(mu) + 1) for mu in MU]
