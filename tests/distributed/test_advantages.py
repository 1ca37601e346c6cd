"""Advantages with a KL penalty in the reward and over the batch's deviation, of two ranks, against plain Python."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_dppo.advantages.groups import compute_group_advantages
from megatron_dppo.losses.divergence import kl_estimate
from megatron_dppo.run.step import refine_advantages
from megatron_dppo.types import Completion, FinishReason, Prompt, Rollout, RolloutGroup, TrainingSample
from tests.distributed.spawn import run_distributed
from tests.unit import configs

pytestmark = pytest.mark.distributed

SIBLINGS, COEFFICIENT = 3, 0.3
CASES = [
    (advantage, coefficient, estimator, normalization)
    for advantage in ("none", "mean", "std", "leave_one_out")
    for coefficient, estimator in ((0.0, "k1"), (COEFFICIENT, "k1"), (COEFFICIENT, "k2"), (COEFFICIENT, "k3"))
    for normalization in ("none", "batch")
]


def responses(rank: int) -> list[list[dict[str, Any]]]:
    """Groups of a rank: rewards (None = failed), and of each token log mu, log of the reference, and the loss mask."""
    draw = random.Random(rank)
    groups = []
    for _ in range(2 + rank):
        group = []
        for _ in range(SIBLINGS):
            length = draw.randrange(1, 6)
            tokens = [(-draw.random(), -2 * draw.random(), draw.random() < 0.8) for _ in range(length)]
            group.append({"reward": None if draw.random() < 0.15 else draw.random(), "tokens": tokens})
        groups.append(group)
    return groups


def estimate(own: float, reference: float, estimator: str) -> float:
    ratio = math.exp(reference - own)
    return {"k1": own - reference, "k2": (own - reference) ** 2 / 2, "k3": ratio - 1 - (reference - own)}[estimator]


def plain(case: tuple[str, float, str, str]) -> list[list[float]]:
    """The advantages of the tokens of all ranks' responses, one after the other; 0 outside the mask."""
    advantage, coefficient, estimator, normalization = case
    result: list[list[float | None]] = []
    for group in (group for rank in range(2) for group in responses(rank)):
        rewards, penalties = [], []
        for response in group:
            taken = [
                coefficient * estimate(own, ref, estimator) if mask else 0 for own, ref, mask in response["tokens"]
            ]
            penalties.append(taken)
            failed = response["reward"] is None
            rewards.append(None if failed else response["reward"] - (0 if advantage == "none" else sum(taken)))
        known = [reward for reward in rewards if reward is not None]
        for i, (response, taken) in enumerate(zip(group, penalties, strict=True)):
            row: list[float | None] = []
            for t, (_, _, mask) in enumerate(response["tokens"]):
                if rewards[i] is None or not mask:
                    row.append(None)
                elif advantage == "none":
                    row.append(rewards[i] - sum(taken[t:]))
                elif len(known) == 1:
                    row.append(0.0)
                elif advantage == "leave_one_out":
                    row.append(rewards[i] - (sum(known) - rewards[i]) / (len(known) - 1))
                else:
                    centred = rewards[i] - statistics.fmean(known)
                    row.append(centred / (statistics.stdev(known) + 1e-4) if advantage == "std" else centred)
            result.append(row)
    tokens = [value for row in result for value in row if value is not None]
    if normalization == "batch":
        mean, deviation = statistics.fmean(tokens), math.sqrt(statistics.variance(tokens) + 1e-8)
        return [[0.0 if value is None else (value - mean) / deviation for value in row] for row in result]
    return [[0.0 if value is None else value for value in row] for row in result]


def rollouts(rank: int) -> tuple[list[RolloutGroup], list[TrainingSample]]:
    groups, samples = [], []
    for group in responses(rank):
        prompt = Prompt(prompt_id="", text="", token_ids=(1,), label="")
        own = []
        for response in group:
            mu, reference, mask = (list(column) for column in zip(*response["tokens"], strict=True))
            ids = torch.ones(len(mu), dtype=torch.int64)
            completion = Completion(
                token_ids=ids.int(), logprobs=None, finish_reason=FinishReason.STOP, policy_version=0, text=""
            )
            reward = response["reward"]
            own.append(
                Rollout(prompt=prompt, completion=completion, reward=reward or 0.0, reward_failed=reward is None)
            )
            samples.append(
                TrainingSample(
                    tokens=ids,
                    labels=ids,
                    loss_mask=torch.tensor(mask),
                    advantages=torch.zeros(len(mu)),
                    rollout_logprobs=torch.tensor(mu),
                    reference_logprobs=torch.tensor(reference),
                )
            )
        groups.append(RolloutGroup(prompt=prompt, rollouts=tuple(own)))
    return groups, samples


def check(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    groups, samples = rollouts(rank)
    before = sum(len(g) for g in responses(0)) if rank else 0
    for case in CASES:
        advantage, coefficient, estimator, normalization = case
        config = configs.config(
            train={"advantage": advantage, "advantage_normalization": normalization},
            reward={"kl_coef": coefficient, "kl_estimator": estimator},
        )
        first = [
            TrainingSample(**{**vars(s), "advantages": torch.where(s.loss_mask, value, 0.0)})
            for s, value in zip(
                samples, compute_group_advantages(groups, config.train, config.reward).flatten(), strict=True
            )
        ]
        result = refine_advantages(first, groups, config.train, config.reward, group=group)
        expected = plain(case)[before : before + len(samples)]
        for sample, row in zip(result, expected, strict=True):
            torch.testing.assert_close(sample.advantages, torch.tensor(row), rtol=1e-4, atol=1e-5, msg=str(case))


def test_two_ranks_against_plain_python() -> None:
    run_distributed(check, 2)


def test_one_estimate_of_each_kind_by_hand() -> None:
    """log p = ln .4, log anchor = ln .2: the ratio anchor / p is one half."""
    own, anchor = torch.tensor([math.log(0.4)]), torch.tensor([math.log(0.2)])
    for estimator, expected in (("k1", 0.693147), ("k2", 0.240227), ("k3", 0.193147)):
        assert float(kl_estimate(own, anchor, estimator)) == pytest.approx(expected, abs=1e-6)
