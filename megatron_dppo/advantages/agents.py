"""Advantages of the agents of an environment: each agent's rewards relative to its own in the group's episodes."""

from collections.abc import Sequence
from typing import Literal, cast

import torch

from megatron_dppo.advantages.group_relative import group_relative_advantages
from megatron_dppo.types import RolloutGroup


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
