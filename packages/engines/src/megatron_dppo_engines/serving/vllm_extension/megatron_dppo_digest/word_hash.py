"""Hash of 32-bit words: constants and mixing functions of SGLang's ``gpu_tensor_hash``."""

from __future__ import annotations

from torch import Tensor

WORD = 0xFFFFFFFF
MIX_1 = 0x85EBCA6B
MIX_2 = 0xC2B2AE35
POSITION_1 = 0x27D4EB2D
POSITION_2 = 0x165667B1
SEED_1 = 0x243F6A88
SEED_2 = ((SEED_1 * 0x9E3779B1) ^ 0xDEADBEEF) & WORD
TILE = 8192
"""Words whose hashes are summed and mixed together."""
CONSTANTS = {
    "TILE": TILE,
    "MIX_1": MIX_1,
    "MIX_2": MIX_2,
    "POSITION_1": POSITION_1,
    "POSITION_2": POSITION_2,
    "SEED_1": SEED_1,
    "SEED_2": SEED_2,
}


def mix(words: Tensor) -> Tensor:
    """Apply the finalizer of MurmurHash3 to 32-bit words in int64."""
    words = words ^ (words >> 16)
    words = _times(words, MIX_1)
    words = words ^ (words >> 13)
    words = _times(words, MIX_2)
    return words ^ (words >> 16)


def _times(words: Tensor, factor: int) -> Tensor:
    # Two products of 48 bits: one of 64 does not fit into a signed integer.
    high = ((words >> 16) * factor) & 0xFFFF
    return ((high << 16) + (words & 0xFFFF) * factor) & WORD


def splitmix(value: int) -> int:
    """Apply the finalizer of SplitMix64 to a 64-bit sum."""
    mask = (1 << 64) - 1
    value &= mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)
