"""The combine weights of routes, which stand beside the experts in the same column.

A row of routes with weights is its k expert ids and then the bytes of k fp32 numbers, in the dtype of the ids
(``RoutingShape.width`` numbers): what cuts, packs, sends and saves routes need not know of them. A missing row is all
ones in bits, which is NaN in fp32: its weights are missing too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


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


MISSING_EXPERT: Mapping[torch.dtype, int] = {torch.uint8: 255, torch.int16: -1}
"""What stands in ``routed_experts`` where a router's choice is not known, by dtype."""


@dataclass(frozen=True, kw_only=True)
class RoutingShape:
    """The sizes of a mixture-of-experts model that routes ``[tokens, L, k]`` have to fit."""

    num_layers: int
    """L, dense layers included"""
    num_experts: int
    topk: int
    """k, experts a token"""
    dense_layers: frozenset[int] = frozenset()
    """layers without a router, from 0; their rows are missing"""
    weights: bool = False
    """whether the k combine weights of a row stand beside its experts, see ``types.router_weights``"""
    weights_add_to_one: bool = True
    """``norm_topk_prob`` of the model; else they add to at most one"""
    weights_scale: float = 1.0
    """that they are multiplied by afterwards (``routed_scaling_factor``)"""

    @property
    def dtype(self) -> torch.dtype:
        """The smallest one that holds every expert and the missing value."""
        return torch.uint8 if self.num_experts <= MISSING_EXPERT[torch.uint8] else torch.int16

    @property
    def width(self) -> int:
        """Numbers in a row: k, and as many as the bytes of k fp32 weights fill."""
        return self.topk + self.weights * 4 * self.topk // self.dtype.itemsize
