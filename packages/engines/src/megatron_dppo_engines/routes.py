"""Router choices of a response, and the combine weights that are stored in the same column.

A row of routes with weights holds its k expert ids, then the bytes of k fp32 numbers in the dtype of the ids
(``RoutingShape.width`` numbers). Code that cuts, packs, sends and saves routes works on both forms. A missing row is
all ones in bits, which is NaN in fp32, so its weights are missing too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


def with_weights(experts: Tensor, weights: Tensor) -> Tensor:
    """Join experts ``[..., k]`` and their combine weights ``[..., k]`` to routes ``[..., width]``.

    The weights of missing experts become missing.
    """
    absent = experts[..., :1] == MISSING_EXPERT[experts.dtype]
    # As bits, since no rule says which NaN another NaN is copied as.
    bits = torch.where(absent, -1, weights.float().contiguous().view(torch.int32))
    return torch.cat([experts, bits.view(experts.dtype)], -1)


def select_experts(routes: Tensor, shape: RoutingShape) -> Tensor:
    """Return the experts ``[..., k]`` of routes with or without weights."""
    return routes[..., : shape.topk]


def select_weights(routes: Tensor, shape: RoutingShape) -> Tensor:
    """Return the combine weights of routes that have them, fp32 ``[..., k]``; NaN means missing."""
    # A copy, because fp32 numbers must be aligned to four bytes.
    return routes[..., shape.topk :].clone(memory_format=torch.contiguous_format).view(torch.float32)


MISSING_EXPERT: Mapping[torch.dtype, int] = {torch.uint8: 255, torch.int16: -1}
"""Value in ``routed_experts`` for an unknown choice of a router, by dtype."""


@dataclass(frozen=True, kw_only=True)
class RoutingShape:
    """Sizes of a mixture-of-experts model that routes ``[num_tokens, L, k]`` must fit."""

    num_layers: int
    """L, dense layers included."""
    num_experts: int
    """Experts per layer."""
    topk: int
    """Experts per token, k."""
    dense_layers: frozenset[int] = frozenset()
    """Indices of layers without a router, from 0. Their rows are missing."""
    weights: bool = False
    """True if rows also hold the k combine weights."""
    has_sigmoid: bool = False
    """True if routers weigh experts by sigmoids of their logits, else by a softmax."""
    weights_add_to_one: bool = True
    """True if the combine weights of a token add up to one (``norm_topk_prob`` of the model), else to at most one."""
    weights_scale: float = 1.0
    """Factor of the combine weights after normalization (``routed_scaling_factor``)."""

    @property
    def dtype(self) -> torch.dtype:
        """The smallest dtype that holds every expert and the missing value."""
        return torch.uint8 if self.num_experts <= MISSING_EXPERT[torch.uint8] else torch.int16

    @property
    def width(self) -> int:
        """Numbers in a row: k, and as many as the bytes of k fp32 weights fill."""
        # An fp32 weight fills 4 numbers of uint8 or 2 of int16.
        return self.topk + self.weights * 4 * self.topk // self.dtype.itemsize
