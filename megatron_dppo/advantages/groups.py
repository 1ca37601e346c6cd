"""Rewards of groups of rollouts, and their advantages by the configuration."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_dppo.advantages.by_name import advantages_by
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
