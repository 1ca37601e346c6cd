"""Digests of tensors whose bytes arrive in parts, one tensor at a time."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

from .word_hash import POSITION_1, POSITION_2, SEED_1, SEED_2, TILE, WORD, mix, splitmix

_CHUNK_WORDS = 1 << 22
"""Words that are processed at a time without the kernel, which bounds the memory of intermediate values."""


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor in row-major order, uint8 [bytes]; without a copy if it is contiguous."""
    # As megatron_dppo_engines.responses.as_bytes, which vLLM's workers do not have.
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class Cut(NamedTuple):
    """Division of a tensor's bytes between ranks. Rank i has ``rows`` runs of ``width`` bytes, ``stride`` apart.

    The first run starts at ``i // share * step``. Bytes beyond the end of the tensor are zeros.
    """

    ranks: int
    rows: int
    width: int
    stride: int
    step: int
    share: int = 1
    """Number of consecutive ranks with the same part."""

    @property
    def nbytes(self) -> int:
        """Size of one rank's part in bytes."""
        return self.rows * self.width

    @property
    def is_of_words(self) -> bool:
        """True if every run starts and ends at a word."""
        return not (self.width % 4 or self.stride % 4 or self.step % 4)

    def part(self, data: Tensor, rank: int) -> Tensor:
        """Return the part of a server's rank in the bytes of a tensor."""
        first = rank // self.share * self.step
        if self.rows > 1:
            return data.view(self.rows, self.stride)[:, first : first + self.width].reshape(-1)
        part = data[first : first + self.width]
        return torch.nn.functional.pad(part, (0, self.width - len(part)))


class PartsDigest:
    """Digest of a tensor whose bytes arrive in parts, in any order.

    With ``sha256`` a part that arrives early is stored until its turn. With ``words`` only a part that does not start
    and end at a word is stored.
    """

    def __init__(self, algorithm: str) -> None:
        self._sha = hashlib.sha256() if algorithm == "sha256" else None
        self._words = None if algorithm == "sha256" else WordsDigest()
        self._early: dict[int, Tensor] = {}
        self._end = 0

    def add(self, start: int, part: Tensor) -> None:
        """Add the bytes from ``start`` on; all parts together have no gap and no overlap."""
        data = as_bytes(part)
        if not data.numel():
            return
        if self._words is not None:
            if start % 4 == 0 and data.numel() % 4 == 0:
                self._words.add(start // 4, _as_words(data))
            else:
                self._early[start] = data
            return
        assert self._sha is not None
        self._early[start] = data
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
        for start, run in join_runs(self._early):
            self._words.add(start // 4, _as_words(run))
        self._early.clear()
        return self._words.hexdigest()


def _as_words(data: Tensor) -> Tensor:
    """Return int32 words. Bytes that do not start at a word of their storage are copied."""
    return (data if data.storage_offset() % 4 == 0 else data.clone()).view(torch.int32)


def join_runs(parts: dict[int, Tensor]) -> list[tuple[int, Tensor]]:
    """Join parts, uint8 [..., bytes] by start, where one follows another; zeros fill the last word."""
    runs: list[tuple[int, list[Tensor]]] = []
    end = -1
    for start, data in sorted(parts.items(), key=lambda item: item[0]):
        if start != end:
            runs.append((start, []))
        runs[-1][1].append(data)
        end = start + data.shape[-1]
    # Runs begin and end at words, but for the end of the tensor, which zeros fill up.
    joined = [(start, torch.cat(run, -1)) for start, run in runs]
    return [(start, torch.nn.functional.pad(run, (0, -run.shape[-1] % 4))) for start, run in joined]


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
            value = piece.to(torch.int64) & WORD
            position = torch.arange(start + first, start + first + piece.numel(), device=words.device)
            tile = position // TILE
            lowest = int((start + first) // TILE)
            sums = torch.zeros(2, int((start + first + piece.numel() - 1) // TILE) - lowest + 1, dtype=torch.int64)
            sums = sums.to(words.device)
            for row, factor, seed, turn in ((0, POSITION_1, SEED_1, 15), (1, POSITION_2, SEED_2, 13)):
                turned = ((position << turn) & WORD) | (position >> (32 - turn))
                mixed = mix(value ^ ((position * factor + seed) & WORD) ^ turned)
                sums[row].index_add_(0, tile - lowest, mixed)
            self._tiles.append((lowest, sums))
        self._words += words.numel()

    def hexdigest(self) -> str:
        """Return 16 hexadecimal digits."""
        if not self._words:
            return f"{0:016x}"
        total = torch.zeros(2, -(-self._words // TILE), dtype=torch.int64)
        for lowest, sums in self._tiles:
            total[:, lowest : lowest + sums.shape[1]] += sums.cpu()
        mixed = mix((total & WORD) ^ (self._words * 4 & WORD))
        high, low = (int((row >> 16).sum()) << 16 for row in mixed), (int((row & 0xFFFF).sum()) for row in mixed)
        first, second = (a + b for a, b in zip(high, low, strict=True))
        return f"{splitmix((first << 32) + second):016x}"
