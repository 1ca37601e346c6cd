"""OPO: the reward minus a baseline that weighs the responses of a group by their lengths.

    A_i = R_i - sum over j of L_j R_j / sum over j of L_j,    L the number of sampled tokens

Source: arXiv 2505.23585, as verl 1dda039 (``compute_opo_outcome_advantage``) states it
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_dppo.types import RolloutGroup


def length_weighted_advantages(rewards: Tensor, lengths: Tensor, valid: Tensor) -> Tensor:
    """Return each reward minus the length-weighted mean of its group.

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
