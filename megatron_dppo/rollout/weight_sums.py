"""What a server says of the weights that it holds: a digest of each tensor, on each of its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class WeightLayout:
    """How a server's tensors come from those that were sent."""

    algorithm: Literal["sha256", "words"]
    """of its digests; see ``engines/serving/vllm_extension/megatron_dppo_digest.py``"""
    tp_size: int
    plain: bool
    """whether tensors of the server are ours, alone, fused or cut by tensor parallelism, as far as is known from
    outside: no quantisation, no expert parallelism. Otherwise no digest can be foretold."""
    complete: bool = False
    """whether ``RankSums.loaded`` has all tensors whose form the server changes after loading, so that each tensor must
    be found as it was sent"""


@dataclass(frozen=True, kw_only=True)
class RankSums:
    """Digests of one rank of a server, by the server's names (``...qkv_proj.weight``, ``...experts.w13_weight``)."""

    tp_rank: int
    sums: Mapping[str, str]
    """of the tensors in use, hexadecimal, perhaps cut short"""
    loaded: Mapping[str, str] = field(default_factory=dict)
    """of tensors as they were loaded last, before the server brought them into the form of its kernels"""
