"""Advantages that read more of a group than its rewards: parts of rewards, a greedy response, lengths."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_dppo.advantages.group_relative import group_relative_advantages
from megatron_dppo.types import RolloutGroup


def decoupled_advantages(parts: Mapping[str, Tensor], weights: Mapping[str, float], valid: Tensor) -> Tensor:
    """Return the weighted sum of the normalized parts of a reward (GDPO).

        A_i = sum over k of w_k (r_ik - mean_k) / (deviation_k + 1e-4),    k a part; mean and deviation of its group

    Source: arXiv 2601.05242 (PMLR v306, liu26aa), equations 4 and 5. Its equation 6, the normalization over the batch,
    is ``train.advantage_normalization = "batch"``.

    Example: With weights 1 and 1, being right and being short would cancel; with 1 and 0.5, being right counts more:

        >>> parts = {"right": torch.tensor([[1.0, 0.0]]), "short": torch.tensor([[0.0, 1.0]])}
        >>> decoupled_advantages(parts, {"right": 1.0, "short": 0.5}, torch.ones(1, 2, dtype=torch.bool))
        tensor([[ 0.3535, -0.3535]])

    ``parts`` are ``[groups, samples]``. A part with weight 1 and values up to 0.1 counts as much as one with values up
    to 1, since both are divided by their deviation. Exactly 0 for invalid samples and for groups in which no part has a
    spread.
    """
    terms = [weight * group_relative_advantages(parts[name], "std", valid) for name, weight in weights.items()]
    return torch.stack(terms).sum(0)


def reward_parts(groups: Sequence[RolloutGroup], names: Sequence[str]) -> dict[str, Tensor]:
    """Return the named parts of all rewards, float64 ``[groups, samples]`` each; NaN where the reward failed."""

    def values(name: str) -> list[list[float]]:
        return [[r.reward_parts.get(name, torch.nan) for r in group.rollouts] for group in groups]

    return {name: torch.tensor(values(name), dtype=torch.float64) for name in names}


def greedy_advantages(rewards: Tensor, baselines: Tensor, baseline_valid: Tensor, valid: Tensor) -> Tensor:
    """Return each reward minus the reward of its group's greedy response (ReMax).

        A_i = R_i - R_greedy

    Source: arXiv 2310.10505, algorithm 1, as verl 1dda039 (``compute_remax_outcome_advantage``) states it

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


def length_weighted_advantages(rewards: Tensor, lengths: Tensor, valid: Tensor) -> Tensor:
    """Return each reward minus the length-weighted mean of its group (OPO).

        A_i = R_i - sum over j of L_j R_j / sum over j of L_j,    L the number of sampled tokens

    Source: arXiv 2505.23585, as verl 1dda039 (``compute_opo_outcome_advantage``) states it

    ``lengths [groups, samples]`` count sampled tokens, at least 1 where valid. Exactly 0 for invalid samples and for
    groups without spread: verl gives a group of one sample its reward; here it has no spread.

    Example:
        >>> rewards, lengths = torch.tensor([[1.0, 0.0]]), torch.tensor([[30, 10]])
        >>> length_weighted_advantages(rewards, lengths, torch.ones(1, 2, dtype=torch.bool))
        tensor([[ 0.2500, -0.7500]])
    """
    known = torch.where(valid, rewards, 0.0).double()
    weights = torch.where(valid, lengths, 0)
    baseline = (known * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True).clamp(min=1)
    # A baseline of equal rewards may be off by one rounding.
    lowest = torch.where(valid, known, torch.inf).amin(1, keepdim=True)
    highest = torch.where(valid, known, -torch.inf).amax(1, keepdim=True)
    return torch.where(valid & (highest > lowest), known - baseline, 0.0).to(rewards.dtype)


def sampled_lengths(groups: Sequence[RolloutGroup]) -> Tensor:
    """Return the number of tokens that the policy sampled in each response, int64 ``[groups, samples]``."""

    def length(mask: Tensor | None, count: int) -> int:
        return count if mask is None else int(mask.sum())

    rows = [[length(r.completion.loss_mask, len(r.completion.token_ids)) for r in group.rollouts] for group in groups]
    return torch.tensor(rows, dtype=torch.int64)
