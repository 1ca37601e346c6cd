"""Rewards of groups of rollouts, and their advantages by the configuration."""

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor

from megatron_dppo.advantages.by_name import advantages_by
from megatron_dppo.advantages.group_relative import group_relative_advantages
from megatron_dppo.config.reward import RewardConfig
from megatron_dppo.config.train import TrainConfig
from megatron_dppo.types import RolloutGroup


def compute_group_advantages(
    groups: Sequence[RolloutGroup], train: TrainConfig, reward: RewardConfig, penalties: Tensor | None = None
) -> Tensor:
    """Return the advantages of the rewards less ``penalties``, float32 ``[groups, samples]``."""
    rewards = group_rewards(groups)
    if penalties is not None:
        rewards = rewards - penalties
    advantages = advantages_by(
        train.advantage,
        rewards,
        is_scored(groups),
        options=train.advantage_options,
        groups=groups,
        weights=reward.part_weights,
    )
    return advantages.float()


def group_rewards(groups: Sequence[RolloutGroup]) -> Tensor:
    """Return the rewards, float64 ``[groups, samples]``: in float32 large ones that differ could be equal."""
    return torch.tensor([[r.reward for r in group.rollouts] for group in groups], dtype=torch.float64)


def is_scored(groups: Sequence[RolloutGroup]) -> Tensor:
    """Return ``[groups, samples]``: True for rollouts whose reward did not fail."""
    return torch.tensor([[not r.reward_failed for r in group.rollouts] for group in groups])


def agent_rewards(group: RolloutGroup) -> dict[str, dict[tuple[int, int], float]]:
    """Return the rewards of each agent by (index of the rollout, number of the run), of the scored rollouts alone."""
    rewards: dict[str, dict[tuple[int, int], float]] = {}
    for index, rollout in enumerate(group.rollouts):
        if not rollout.reward_failed:
            for credit in rollout.completion.segment_credits:
                rewards.setdefault(credit.agent, {})[index, credit.run] = credit.reward
    return rewards


def agent_advantages(groups: Sequence[RolloutGroup], name: str) -> list[float]:
    """Return the advantage of each segment, in the order of groups, rollouts and segments.

    Example: Two players have the rewards 1 and -1 in the first episode, and -1 and 1 in the second. All sums are 0, and
    so would be the advantages of the episodes. Those of the players are 1, -1, -1 and 1.

    The agent's runs in the group stand for the samples. ``name`` is ``mean``, ``std``, ``leave_one_out`` or ``none``.
    """
    result = []
    for group in groups:
        advantages: dict[tuple[int, int], float] = {}
        for rewards in agent_rewards(group).values():
            row = torch.tensor([list(rewards.values())], dtype=torch.float64)
            if name != "none":
                row = group_relative_advantages(row, cast(Literal["mean", "std", "leave_one_out"], name))
            advantages |= zip(rewards, row[0].tolist(), strict=True)
        for index, rollout in enumerate(group.rollouts):
            credits = rollout.completion.segment_credits
            # Of a failed episode, whose segments have no credits, nothing trains.
            runs = [credit.run for credit in credits] or [-1] * len(rollout.completion.segments)
            result += [advantages.get((index, run), 0.0) for run in runs]
    return result
