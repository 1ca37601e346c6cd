"""Digests of weights that trainer and server compute alike, also from parts that arrive one after the other.

There are two algorithms. ``sha256`` hashes the bytes in row-major order. ``words``, for GPUs, sums a position-dependent
hash of 32-bit words, so that parts may arrive in any order. It is the algorithm of SGLang's ``gpu_tensor_hash``
(0.5.19 to 0.5.23, sglang/kernels/ops/memory/gpu_tensor_hash.py), written in torch so that it needs no Triton. It
detects faults, not forgeries. This file imports only torch, because it is also loaded inside vLLM.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MIX_1 = 0x85EBCA6B
_MIX_2 = 0xC2B2AE35
_POSITION_1 = 0x27D4EB2D
_POSITION_2 = 0x165667B1
_SEED_1 = 0x243F6A88
_SEED_2 = ((_SEED_1 * 0x9E3779B1) ^ 0xDEADBEEF) & _WORD
_TILE = 8192
"""Words whose hashes are summed and mixed together."""
_CHUNK_WORDS = 1 << 22
"""Words that are processed at a time, which bounds the memory of intermediate values."""


def tensor_digest(tensor: Tensor) -> str:
    """Return ``sha256:...`` for a tensor on the CPU, ``words:...`` for one on another device."""
    algorithm = "sha256" if tensor.device.type == "cpu" else "words"
    parts = PartsDigest(algorithm)
    parts.add(0, tensor)
    return f"{algorithm}:{parts.hexdigest()}"


class PartsDigest:
    """Digest of a tensor whose bytes arrive in parts, in any order.

    With ``sha256`` a part that arrives early is stored until its turn. With ``words`` only a part that does not start
    and end at a word is stored.

    Args:
        algorithm: ``sha256`` or ``words``.
    """

    def __init__(self, algorithm: str) -> None:
        self._sha = hashlib.sha256() if algorithm == "sha256" else None
        self._words = None if algorithm == "sha256" else WordsDigest()
        self._early: dict[int, Tensor] = {}
        self._end = 0
        self._broken_word = False

    def add(self, start: int, part: Tensor) -> None:
        """Add the bytes from ``start`` on; all parts together have no gap and no overlap."""
        # As megatron_dppo.types.as_bytes, which vLLM's workers do not have.
        data = part.detach().contiguous().as_strided((part.numel(),), (1,)).view(torch.uint8)
        if not data.numel():
            return
        if self._words is not None and not self._broken_word and start % 4 == 0 and data.numel() % 4 == 0:
            self._words.add(start // 4, data.view(torch.int32))
            return
        self._early[start] = data
        if self._sha is None:
            self._broken_word = self._broken_word or start % 4 != 0 or data.numel() % 4 != 0
        else:
            while self._end in self._early:
                ready = self._early.pop(self._end)
                self._sha.update(memoryview(ready.cpu().numpy()))
                self._end += ready.numel()

    def hexdigest(self) -> str:
        """Return the hexadecimal digest of all parts."""
        if self._sha is not None:
            assert not self._early, "a gap"
            return self._sha.hexdigest()
        assert self._words is not None
        runs: list[list[tuple[int, Tensor]]] = []
        for start, data in sorted(self._early.items()):
            if runs and runs[-1][-1][0] + runs[-1][-1][1].numel() == start:
                runs[-1].append((start, data))
            else:
                runs.append([(start, data)])
        for run in runs:
            joined = torch.cat([data for _, data in run])
            # Runs begin and end at words, but for the end of the tensor, which zeros fill up.
            padded = torch.nn.functional.pad(joined, (0, -joined.numel() % 4))
            self._words.add(run[0][0] // 4, padded.view(torch.int32))
        self._early.clear()
        return self._words.hexdigest()


class WordsDigest:
    """Sum of the hashes of all tiles of words."""

    def __init__(self) -> None:
        self._tiles: list[tuple[int, Tensor]] = []
        self._words = 0

    @torch.no_grad()
    def add(self, start: int, words: Tensor) -> None:
        """Add int32 words from index ``start`` on."""
        for first in range(0, words.numel(), _CHUNK_WORDS):
            piece = words[first : first + _CHUNK_WORDS]
            # As unsigned 32-bit words, for which torch has arithmetic only in int64.
            value = piece.to(torch.int64) & _WORD
            position = torch.arange(start + first, start + first + piece.numel(), device=words.device)
            tile = position // _TILE
            lowest = int((start + first) // _TILE)
            sums = torch.zeros(2, int((start + first + piece.numel() - 1) // _TILE) - lowest + 1, dtype=torch.int64)
            sums = sums.to(words.device)
            for row, factor, seed, turn in ((0, _POSITION_1, _SEED_1, 15), (1, _POSITION_2, _SEED_2, 13)):
                turned = ((position << turn) & _WORD) | (position >> (32 - turn))
                mixed = _mix(value ^ ((position * factor + seed) & _WORD) ^ turned)
                sums[row].index_add_(0, tile - lowest, mixed)
            self._tiles.append((lowest, sums))
        self._words += words.numel()

    def hexdigest(self) -> str:
        """Return 16 hexadecimal digits."""
        if not self._words:
            return f"{0:016x}"
        total = torch.zeros(2, -(-self._words // _TILE), dtype=torch.int64)
        for lowest, sums in self._tiles:
            total[:, lowest : lowest + sums.shape[1]] += sums.cpu()
        mixed = _mix((total & _WORD) ^ (self._words * 4 & _WORD))
        high, low = (int((row >> 16).sum()) << 16 for row in mixed), (int((row & 0xFFFF).sum()) for row in mixed)
        first, second = (a + b for a, b in zip(high, low, strict=True))
        return f"{_splitmix((first << 32) + second):016x}"


def _mix(words: Tensor) -> Tensor:
    """Apply the finalizer of MurmurHash3 to 32-bit words in int64."""
    words = words ^ (words >> 16)
    words = _times(words, _MIX_1)
    words = words ^ (words >> 13)
    words = _times(words, _MIX_2)
    return words ^ (words >> 16)


def _times(words: Tensor, factor: int) -> Tensor:
    # Two products of 48 bits: one of 64 does not fit into a signed integer.
    high = ((words >> 16) * factor) & 0xFFFF
    return ((high << 16) + (words & 0xFFFF) * factor) & _WORD


def _splitmix(value: int) -> int:
    mask = (1 << 64) - 1
    value &= mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)
