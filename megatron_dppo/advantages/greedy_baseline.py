"""ReMax: the reward minus that of the greedy response to the same prompt.

    A_i = R_i - R_greedy

Source: arXiv 2310.10505, algorithm 1, as verl 1dda039 (``compute_remax_outcome_advantage``) states it
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_dppo.types import RolloutGroup


def greedy_advantages(rewards: Tensor, baselines: Tensor, baseline_valid: Tensor, valid: Tensor) -> Tensor:
    """Return each reward minus the reward of its group's greedy response.

    Example: All samples fail where the greedy response succeeds, so that all are made less probable:

        >>> rewards, valid = torch.tensor([[0.0, 0.0]]), torch.ones(1, 2, dtype=torch.bool)
        >>> greedy_advantages(rewards, torch.tensor([1.0]), torch.tensor([True]), valid)
        tensor([[-1., -1.]])

    ``baselines [groups]`` are the rewards of the greedy responses, ``baseline_valid`` False where one failed. Exactly 0
    for invalid samples and for groups without a baseline.
    """
    baseline = baselines.to(rewards.dtype).unsqueeze(1)
    return torch.where(valid & baseline_valid.unsqueeze(1), rewards - baseline, 0.0)


def greedy_rewards(groups: Sequence[RolloutGroup]) -> tuple[Tensor, Tensor]:
    """Return the rewards of the greedy responses, float64, and False where one failed, bool; ``[groups]``."""
    greedy = [group.greedy for group in groups]
    rewards = [response.reward for response in greedy if response is not None]
    if len(rewards) < len(greedy):
        raise ValueError(
            "advantage 'remax' needs the greedy response of every group, which only the scheduler of a run samples. "
            "Fix: set RolloutGroup.greedy"
        )
    is_scored = [not response.reward_failed for response in greedy if response is not None]
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(is_scored, dtype=torch.bool)
