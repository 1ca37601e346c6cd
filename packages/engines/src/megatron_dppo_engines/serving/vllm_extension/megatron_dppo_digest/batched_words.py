"""Hashes of the words of many tensors on a GPU: one launch a batch, and one read for all."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .parts import Cut, join_runs
from .word_hash import CONSTANTS, TILE, WORD, mix, splitmix

BATCH_BYTES = 128 << 20
"""Bytes of parts after which the kernel is launched. Their tensors stay in memory until then."""
SLICE = 1 << 20
"""Sums of pieces or tiles that are added up at a time, which bounds the memory of intermediate values."""
_MOST_WORDS = 2**31 - 1
"""Words of a tensor: the kernel's indices have 32 bits."""


class _Row(NamedTuple):
    """Parts of all ranks in one tensor, as the kernel reads them; sizes in words."""

    end: int
    """End of its programs in the batch, exclusive."""
    first_program: int
    address: int
    count: int
    """Size of one rank's part."""
    width: int
    """Size of a contiguous run of the part."""
    stride: int
    """Distance of these runs."""
    step: int
    """Distance of the parts of two ranks."""
    share: int
    """Number of consecutive ranks with the same part."""
    limit: int
    """Size of the tensor. A part has zeros beyond it."""
    start: int
    """Position of the part in its target."""
    span: int
    """Number of tiles of the target that the part touches."""


NUM_FIELDS = len(_Row._fields)
"""Columns of the kernel's table."""


@dataclass
class _Target:
    """Tensor of a server, on all of its ranks."""

    index: int
    ranks: int
    words: int = 0
    """End of the parts so far, of one rank."""
    odd: dict[int, Tensor] = field(default_factory=dict)
    """Parts that do not start and end at a word, by start. Shape [ranks, bytes], uint8."""


class BatchedWords:
    """The algorithm ``words`` for many tensors on one GPU, bit for bit as ``WordsDigest``.

    Each row of a batch's table stands for the parts of all ranks in one tensor, so their number costs no time here.
    """

    def __init__(self) -> None:
        self._targets: dict[Hashable, _Target] = {}
        # The batch that is collected.
        self._rows: list[_Row] = []
        self._tensors: list[Tensor] = []
        self._row_targets: list[int] = []
        self._bytes = 0
        # Batches that were launched.
        self._tables: list[np.ndarray] = []
        self._sums: list[Tensor] = []

    def add(self, key: Hashable, start: int, data: Tensor, cut: Cut) -> None:
        """Add the parts of all ranks in a tensor of these bytes; ``start`` is in bytes of the target."""
        target = self._targets.setdefault(key, _Target(len(self._targets), cut.ranks))
        if start % 4 or data.numel() % 4 or data.data_ptr() % 4 or not cut.is_of_words:
            target.odd[start] = torch.stack([cut.part(data, rank) for rank in range(cut.ranks)])
            return
        count = cut.nbytes // 4
        # The parts of a padded tensor end behind it.
        size = max(data.numel(), (cut.ranks - 1) // cut.share * cut.step + cut.nbytes)
        if size > _MOST_WORDS * 4:
            raise ValueError(f"{key}: expected a tensor of at most {_MOST_WORDS * 4} bytes, got {size}")
        if not count:
            return
        first = start // 4
        target.words = max(target.words, first + count)
        span = (first + count - 1) // TILE - first // TILE + 1
        first_program = self._rows[-1].end if self._rows else 0
        row = _Row(
            end=first_program + span * cut.ranks,
            first_program=first_program,
            address=data.data_ptr(),
            count=count,
            width=cut.width // 4,
            stride=cut.stride // 4,
            step=cut.step // 4,
            share=cut.share,
            limit=data.numel() // 4,
            start=first,
            span=span,
        )
        self._rows.append(row)
        self._tensors.append(data)
        self._row_targets.append(target.index)
        self._bytes += cut.nbytes * cut.ranks
        if self._bytes >= BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Launch the kernel for the parts that were added; afterwards their tensors may change."""
        if not self._rows:
            return
        table = np.array(self._rows, dtype=np.int64)
        device = self._tensors[0].device
        sums = torch.empty(self._rows[-1].end, 2, dtype=torch.int32, device=device)
        # Only here, since Triton may be missing where there is no GPU.
        from .words_kernel import hash_parts

        with torch.cuda.device_of(sums):
            hash_parts(_to_device(table, device), sums, NUM_FIELDS, CONSTANTS)
        self._tables.append(np.column_stack([table, self._row_targets]))
        self._sums.append(sums)
        self._rows = []
        self._tensors = []
        self._row_targets = []
        self._bytes = 0

    @torch.no_grad()
    def hexdigests(self) -> dict[Hashable, list[str]]:
        """Return 16 hexadecimal digits for each rank of each target, after one read from the device.

        Those of a target that lacks parts mean nothing.
        """
        for key, target in self._targets.items():
            odd = join_runs(target.odd)
            target.odd = {}
            for start, run in odd:
                size = run.shape[-1]
                self.add(key, start, run.reshape(-1), Cut(target.ranks, 1, size, size, size))
        self.flush()
        values = self._values() if self._sums else []
        result = dict[Hashable, list[str]]()
        first = 0
        for key, target in self._targets.items():
            ranks = values[first : first + target.ranks] if target.words else [None] * target.ranks
            result[key] = [f"{0 if value is None else splitmix(value):016x}" for value in ranks]
            first += target.ranks
        return result

    def _values(self) -> list[int]:
        """Return the sum of the mixed tiles of each rank of each target."""
        targets = np.array([(target.ranks, target.words) for target in self._targets.values()], dtype=np.int64)
        ranks = targets[:, 0]
        tiles = -(-targets[:, 1] // TILE)
        ends = np.cumsum(ranks * tiles)
        first_tile = ends - ranks * tiles
        total = self._sum_by_tile(tiles, first_tile, int(ends[-1]))
        first_value = np.cumsum(ranks) - ranks
        columns = np.stack([ends, first_tile, np.maximum(tiles, 1), first_value, targets[:, 1] * 4 & WORD])
        tile_end, tile_start, size, value_start, nbytes = _to_device(columns, total.device)
        values = torch.zeros(int(ranks.sum()), dtype=torch.int64, device=total.device)
        for begin in range(0, len(total), SLICE):
            part = total[begin : begin + SLICE]
            tile = torch.arange(begin, begin + len(part), device=total.device)
            # By the ends, since a target without words has no tile.
            target = torch.searchsorted(tile_end, tile, right=True)
            value = value_start[target] + (tile - tile_start[target]) // size[target]
            mixed = mix((part & WORD) ^ nbytes[target][:, None])
            values.index_add_(0, value, (mixed[:, 0] << 32) + mixed[:, 1])
        return values.tolist()

    def _sum_by_tile(self, tiles: np.ndarray, first_tile: np.ndarray, num_tiles: int) -> Tensor:
        """Return the sums of all pieces of each tile. Shape [num_tiles, 2], int64.

        A target has ``tiles`` on each rank. ``first_tile`` is its first one on rank 0.
        """
        table = np.concatenate(self._tables)
        sums = torch.cat(self._sums)
        columns = dict(zip((*_Row._fields, "target"), table.T, strict=True))
        target = columns["target"]
        num_programs = columns["end"] - columns["first_program"]
        ends = np.cumsum(num_programs)
        rows = [ends - num_programs, columns["span"], tiles[target], first_tile[target] + columns["start"] // TILE]
        first_program, span, size, first = _to_device(np.stack(rows), sums.device)
        total = torch.zeros(num_tiles, 2, dtype=torch.int64, device=sums.device)
        for begin in range(0, len(sums), SLICE):
            part = sums[begin : begin + SLICE]
            program = torch.arange(begin, begin + len(part), device=sums.device)
            row = torch.searchsorted(first_program, program, right=True) - 1
            piece = program - first_program[row]
            tile = first[row] + piece // span[row] * size[row] + piece % span[row]
            total.index_add_(0, tile, part.to(torch.int64))
        return total


def _to_device(array: np.ndarray, device: torch.device) -> Tensor:
    host = torch.from_numpy(array)
    # Pinned, since a copy from other memory waits for everything that the GPU still has to do.
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
