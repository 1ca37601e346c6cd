"""The combine weights of routes, which stand beside the experts in the same column.

A row of routes with weights is its k expert ids and then the bytes of k fp32 numbers, in the dtype of the ids
(``RoutingShape.width`` numbers): what cuts, packs, sends and saves routes need not know of them. A missing row is all
ones in bits, which is NaN in fp32: its weights are missing too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dppo.types.rollouts import MISSING_EXPERT, RoutingShape


def with_weights(experts: Tensor, weights: Tensor) -> Tensor:
    """Routes ``[..., width]`` of experts ``[..., k]`` and their combine weights ``[..., k]``; the weights of missing
    experts become missing."""
    absent = experts[..., :1] == MISSING_EXPERT[experts.dtype]
    # As bits, since no rule says which NaN another NaN is copied as.
    bits = torch.where(absent, -1, weights.float().contiguous().view(torch.int32))
    return torch.cat([experts, bits.view(experts.dtype)], -1)


def experts_of(routes: Tensor, shape: RoutingShape) -> Tensor:
    """The experts ``[..., k]`` of routes with or without weights."""
    return routes[..., : shape.topk]


def weights_of(routes: Tensor, shape: RoutingShape) -> Tensor:
    """The combine weights ``[..., k]`` fp32 of routes that have them; NaN where they are missing."""
    # A copy of its own: fp32 numbers have to lie at multiples of four bytes.
    return routes[..., shape.topk :].clone(memory_format=torch.contiguous_format).view(torch.float32)
