"""GDPO: each part of a reward is normalized by itself, and the advantage is the weighted sum.

    A_i = sum over k of w_k (r_ik - mean_k) / (deviation_k + 1e-4),    k a part; mean and deviation of its group

Source: arXiv 2601.05242 (PMLR v306, liu26aa), equations 4 and 5. Its equation 6, the normalization over the batch, is
``train.advantage_normalization = "batch"``.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_dppo.advantages.group_relative import group_relative_advantages
from megatron_dppo.types import RolloutGroup


def decoupled_advantages(parts: Mapping[str, Tensor], weights: Mapping[str, float], valid: Tensor) -> Tensor:
    """Return the weighted sum of the normalized parts.

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
