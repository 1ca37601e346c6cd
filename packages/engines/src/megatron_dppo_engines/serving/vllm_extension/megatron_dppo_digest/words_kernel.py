"""Triton kernel of ``BatchedWords`` in ``megatron_dppo_digest``, which also runs inside vLLM.

Each program hashes the words of one part that fall into one tile of the tensor that the part belongs to, and writes the
two sums of that piece to a slot of its own. So no atomics are needed, and each word is read once.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

NUM_WARPS = 4
BLOCK = 1024
"""Words that a program reads at a time."""


def hash_parts(table: Tensor, sums: Tensor, num_fields: int, constants: Mapping[str, int]) -> None:
    """Launch the kernel for a table [num_rows, num_fields], int64, and sums [number of programs, 2], int32."""
    hash_parts_kernel[(len(sums),)](
        table, sums, len(table), FIELDS=num_fields, BLOCK=BLOCK, **constants, num_warps=NUM_WARPS
    )


@triton.jit
def _mix(x: tl.tensor, FIRST: tl.constexpr, SECOND: tl.constexpr) -> tl.tensor:
    x ^= x >> 16
    x = x * tl.full((), FIRST, tl.uint32)
    x ^= x >> 13
    x = x * tl.full((), SECOND, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def hash_parts_kernel(
    table: tl.tensor,
    sums: tl.tensor,
    num_rows: tl.tensor,
    FIELDS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    MIX_1: tl.constexpr,
    MIX_2: tl.constexpr,
    POSITION_1: tl.constexpr,
    POSITION_2: tl.constexpr,
    SEED_1: tl.constexpr,
    SEED_2: tl.constexpr,
) -> None:
    """Write the two sums of each piece: words of one part in one tile, ``BLOCK`` words at a time.

    The columns of the table are the fields of ``_Row``.
    """
    program = tl.program_id(0)
    # The row whose programs include this one: the first with an end above it.
    low = 0
    high = num_rows - 1
    while low < high:
        middle = (low + high) // 2
        if tl.load(table + middle * FIELDS) > program:
            high = middle
        else:
            low = middle + 1
    row = table + low * FIELDS
    first_program = tl.load(row + 1)
    data = tl.load(row + 2).to(tl.pointer_type(tl.uint32))
    count = tl.load(row + 3).to(tl.int32)
    width = tl.load(row + 4).to(tl.int32)
    stride = tl.load(row + 5).to(tl.int32)
    step = tl.load(row + 6).to(tl.int32)
    share = tl.load(row + 7).to(tl.int32)
    limit = tl.load(row + 8).to(tl.int32)
    start = tl.load(row + 9)
    span = tl.load(row + 10).to(tl.int32)

    piece = (program - first_program).to(tl.int32)
    rank_start = piece // span // share * step
    # First word of the tile, counted from the part's start: negative if the part starts inside of the tile.
    tile_start = ((start // TILE + piece % span) * TILE - start).to(tl.int32)
    position_start = (start + tile_start).to(tl.uint32)
    first = tl.zeros((BLOCK,), tl.uint32)
    second = tl.zeros((BLOCK,), tl.uint32)
    for offset in range(0, TILE, BLOCK):
        offsets = offset + tl.arange(0, BLOCK)
        index = tile_start + offsets
        is_inside = (index >= 0) & (index < count)
        source = rank_start + index
        if width < count:
            source = rank_start + index // width * stride + index % width
        # Words beyond the tensor are padding: zeros that count.
        words = tl.load(data + source, mask=is_inside & (source < limit), other=0)
        position = position_start + offsets.to(tl.uint32)
        one = position * tl.full((), POSITION_1, tl.uint32) + tl.full((), SEED_1, tl.uint32)
        two = position * tl.full((), POSITION_2, tl.uint32) + tl.full((), SEED_2, tl.uint32)
        one = _mix(words ^ one ^ ((position << 15) | (position >> 17)), MIX_1, MIX_2)
        two = _mix(words ^ two ^ ((position << 13) | (position >> 19)), MIX_1, MIX_2)
        first += tl.where(is_inside, one, 0)
        second += tl.where(is_inside, two, 0)
    tl.store(sums + program * 2, tl.sum(first, 0).to(tl.uint32).to(tl.int32, bitcast=True))
    tl.store(sums + program * 2 + 1, tl.sum(second, 0).to(tl.uint32).to(tl.int32, bitcast=True))
