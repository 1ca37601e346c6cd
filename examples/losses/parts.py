"""A custom mask and custom advantages, combined with a built-in loss.

[loss]
name = "cispo"
mask = "examples/losses/parts.py:near_sequences"

[train]
advantage = "examples/losses/parts.py:over_range"
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dppo import LossInputs
from megatron_dppo.losses import needs


def confident_less(inputs: LossInputs, *, power: float = 1.0) -> Tensor:
    """Return a weight that is lower for tokens with a high rollout probability."""
    return (1 - inputs.rollout_logprobs.exp()) ** power


@needs(sequences=True)
def near_sequences(inputs: LossInputs, *, limit: float = 0.1) -> Tensor:
    """Mask all tokens of a sequence whose mean |pi - mu| exceeds the limit."""
    moved = torch.where(inputs.loss_mask, (inputs.logprobs.exp() - inputs.rollout_logprobs.exp()).abs(), 0.0)
    count = int(inputs.sequence_ids.max()) + 1
    sums = moved.new_zeros(count).index_add(0, inputs.sequence_ids, moved)
    tokens = moved.new_zeros(count).index_add(0, inputs.sequence_ids, inputs.loss_mask.to(moved.dtype))
    return (sums / tokens.clamp(min=1) <= limit)[inputs.sequence_ids]


def over_range(rewards: Tensor, valid: Tensor) -> Tensor:
    """Return the reward minus the midrange of its group, over half of the range. Shape ``[groups, samples]``."""
    lowest = torch.where(valid, rewards, torch.inf).amin(1, keepdim=True)
    highest = torch.where(valid, rewards, -torch.inf).amax(1, keepdim=True)
    half = (highest - lowest) / 2
    return torch.where(half > 0, (rewards - lowest - half) / half.clamp(min=1e-6), 0.0)
