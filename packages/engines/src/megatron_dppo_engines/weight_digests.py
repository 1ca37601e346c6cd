"""Digests of the weights that a server holds: one per tensor and rank."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class WeightLayout:
    """Relation of a server's tensors to those that were sent."""

    algorithm: Literal["sha256", "words"]
    """Algorithm of the digests; see ``serving/vllm_extension/megatron_dppo_digest``."""
    tp_size: int
    plain: bool
    """True if each tensor is one that was sent: alone, fused, or sharded by tensor parallelism.

    False with quantization or expert parallelism, where no digest can be predicted.
    """
    complete: bool = False
    """True if ``RankDigests.loaded`` covers every tensor whose form the server changes after loading.

    Each tensor must then match exactly.
    """


@dataclass(frozen=True, kw_only=True)
class RankDigests:
    """Digests of one rank, by the server's names (``...qkv_proj.weight``, ``...experts.w13_weight``)."""

    tp_rank: int
    digests: Mapping[str, str]
    """Hexadecimal digests of the tensors in use, possibly truncated."""
    loaded: Mapping[str, str] = field(default_factory=dict)
    """Digests of tensors as they were last loaded, before the server converted them for its kernels."""
