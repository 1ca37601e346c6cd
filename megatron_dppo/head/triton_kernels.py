"""The device side of ``row_kernels_triton``: one program a row, everything in fp32.

A block is a tile ``[rows, threads, vector]`` of consecutive entries: each thread has one vector of 16 bytes of every
row of it, so loads are coalesced and as wide as the hardware has. Sums over the first and the last axis stay within a
thread; the running values ``[threads]`` are merged across threads only at the end of a row.

z is kept in units of ln 2 until the end, because the hardware's exponential has base 2: ``log2_scale`` is
log2(e) / temperature. The difference to the maximum is always taken before the scaling: a product of large logits is
rounded to their size.
"""

import math

import triton
import triton.language as tl

_NONE = tl.constexpr(2**31 - 1)
_LN2 = tl.constexpr(math.log(2))
_UNDERFLOW = tl.constexpr(-1e4)
"""2 to this power is 0; a finite stand-in for -inf, so that 0 (-inf) comes out as 0 without a branch."""


@triton.jit
def _block_offsets(ROWS: tl.constexpr, THREADS: tl.constexpr, VECTOR: tl.constexpr) -> tl.tensor:
    """Return the offsets of a block's entries from its start."""
    rows = tl.arange(0, ROWS)[:, None, None] * (THREADS * VECTOR)
    return rows + tl.arange(0, THREADS)[None, :, None] * VECTOR + tl.arange(0, VECTOR)[None, None, :]


@triton.jit
def _is_at(index: tl.tensor, ROWS: tl.constexpr, THREADS: tl.constexpr, VECTOR: tl.constexpr) -> tl.tensor:
    """Return ``_block_offsets == index``, as a comparison of one number a thread with constants."""
    constants = tl.arange(0, ROWS)[:, None, None] * (THREADS * VECTOR) + tl.arange(0, VECTOR)[None, None, :]
    return constants == (index - tl.arange(0, THREADS) * VECTOR)[None, :, None]


@triton.jit
def _local_index(index: tl.tensor, shard_size: tl.tensor) -> tl.tensor:
    """Return the index in this shard, or ``_NONE`` for another shard's id or an unused slot."""
    return tl.where((index >= 0) & (index < shard_size), index, _NONE).to(tl.int32)


@triton.jit
def _next_in_set(places: tl.tensor, label: tl.tensor, after: tl.tensor) -> tl.tensor:
    """Return the smallest index above ``after`` that is the label or one of the ids, or ``_NONE``."""
    following = tl.where(label > after, label, _NONE)
    if places is not None:
        following = tl.minimum(following, tl.min(tl.where(places > after, places, _NONE), 0))
    return following


@triton.jit
def _add_block(
    x: tl.tensor,
    start: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    moment: tl.tensor,
    other: tl.tensor,
    square: tl.tensor,
    following: tl.tensor,
    places: tl.tensor,
    label: tl.tensor,
    log2_scale: tl.tensor,
    SQUARES: tl.constexpr,
    ROWS: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
) -> tl.tensor:
    """Add the block ``x`` to the threads' sums of exp(z), exp(z) z, and exp(z) outside the set.

    With ``SQUARES`` also to the sum of exp(2 z) outside the set. Returns all sums.

    ``following`` is the first place of the set that no earlier block held; -inf stands where there is no entry.
    """
    larger = tl.maximum(maximum, tl.max(tl.max(x, 2), 0))
    # Without any entry but -inf there is no maximum to subtract.
    shift = tl.where(larger == -float("inf"), 0.0, larger)
    z = (x - shift[None, :, None]) * log2_scale
    exp = tl.exp2(z)
    step = tl.maximum((maximum - shift) * log2_scale, _UNDERFLOW)
    rescale = tl.exp2(step)
    moment = rescale * (moment + step * total) + tl.sum(tl.sum(exp * tl.maximum(z, _UNDERFLOW), 2), 0)
    total = rescale * total + tl.sum(tl.sum(exp, 2), 0)
    while following < start + ROWS * THREADS * VECTOR:
        exp = tl.where(_is_at(following - start, ROWS, THREADS, VECTOR), 0.0, exp)
        following = _next_in_set(places, label, following)
    other = rescale * other + tl.sum(tl.sum(exp, 2), 0)
    if SQUARES:
        square = rescale * rescale * square + tl.sum(tl.sum(exp * exp, 2), 0)
    return larger, total, moment, other, square, following


@triton.jit
def _store_sums(
    out: tl.tensor,
    maxima: tl.tensor,
    totals: tl.tensor,
    moments: tl.tensor,
    other_sums: tl.tensor,
    squares: tl.tensor,
    at_squares: tl.tensor,
    log2_scale: tl.tensor,
    SQUARES: tl.constexpr,
) -> tl.tensor:
    """Merge the threads' sums into the numbers of the row, and return the shift of its logits."""
    maximum = tl.max(maxima, 0)
    shift = tl.where(maximum == -float("inf"), 0.0, maximum)
    step = tl.maximum((maxima - shift) * log2_scale, _UNDERFLOW)
    rescale = tl.exp2(step)
    total = tl.sum(rescale * totals, 0)
    # The device's maximum passes over NaN; the sum of all exponentials does not.
    poison = tl.where(total == total, 0.0, float("nan"))
    tl.store(out, maximum + poison)
    tl.store(out + 1, tl.sum(rescale * (moments + step * totals), 0) * _LN2 + poison)
    tl.store(out + 2, tl.sum(rescale * other_sums, 0) + poison)
    if SQUARES:
        tl.store(out + at_squares, tl.sum(rescale * rescale * squares, 0) + poison)
    return shift + poison


@triton.jit
def statistics_kernel(
    logits: tl.tensor,
    labels: tl.tensor,
    ids: tl.tensor,
    out: tl.tensor,
    row_stride: tl.tensor,
    shard_size: tl.tensor,
    num_ids: tl.tensor,
    log2_scale: tl.tensor,
    temperature: tl.tensor,
    IDS: tl.constexpr,
    SQUARES: tl.constexpr,
    ROWS: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
) -> None:
    """Write one row of ``out [n, 4 + num_ids]``, with ``SQUARES`` one number more.

    Long because a Triton kernel passes each running sum by name, once for full blocks and once for the last.

    ``IDS`` is a power of 2 that is not below ``num_ids``.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    out += row * (4 + num_ids + SQUARES)
    label = _local_index(tl.load(labels + row), shard_size)
    places = None
    if ids is not None:
        slots = tl.arange(0, IDS)
        places = _local_index(tl.load(ids + row * num_ids + slots, mask=slots < num_ids, other=-1), shard_size)
    ahead = _next_in_set(places, label, -1)

    SIZE: tl.constexpr = ROWS * THREADS * VECTOR
    block = _block_offsets(ROWS, THREADS, VECTOR)
    tops = tl.full([THREADS], -float("inf"), tl.float32)
    total = tl.zeros([THREADS], tl.float32)
    slope = total
    other = total
    square = total
    full_blocks = shard_size // SIZE * SIZE
    for start in range(0, full_blocks, SIZE):
        x = tl.load(logits + start + block).to(tl.float32)
        tops, total, slope, other, square, ahead = _add_block(
            x,
            start,
            tops,
            total,
            slope,
            other,
            square,
            ahead,
            places,
            label,
            log2_scale,
            SQUARES,
            ROWS,
            THREADS,
            VECTOR,
        )
    if full_blocks < shard_size:
        # Apart from the loop, because a mask that ends at an uneven place splits the loads into single entries.
        x = tl.load(logits + full_blocks + block, mask=full_blocks + block < shard_size, other=-float("inf")).to(
            tl.float32
        )
        tops, total, slope, other, square, ahead = _add_block(
            x,
            full_blocks,
            tops,
            total,
            slope,
            other,
            square,
            ahead,
            places,
            label,
            log2_scale,
            SQUARES,
            ROWS,
            THREADS,
            VECTOR,
        )

    shift = _store_sums(out, tops, total, slope, other, square, 4 + num_ids, log2_scale, SQUARES)
    at_label = tl.load(logits + label, mask=label != _NONE, other=0.0).to(tl.float32)
    tl.store(out + 3, tl.where(label != _NONE, tl.div_rn(at_label - shift, temperature), -float("inf")))
    if ids is not None:
        at_ids = tl.load(logits + places, mask=places != _NONE, other=0.0).to(tl.float32)
        y = tl.where(places != _NONE, tl.div_rn(at_ids - shift, temperature), -float("inf"))
        tl.store(out + 4 + slots, y, mask=slots < num_ids)


@triton.jit
def _gradient_block(
    x: tl.tensor,
    at_label: tl.tensor,
    maximum: tl.tensor,
    base: tl.tensor,
    slope: tl.tensor,
    bonus: tl.tensor,
    log2_scale: tl.tensor,
) -> tl.tensor:
    """``bonus`` at the label, less exp(z) (base + slope z)."""
    z = (x - maximum) * log2_scale
    factor = base
    if slope is not None:
        factor = base + slope * tl.maximum(z, _UNDERFLOW)
    return tl.where(at_label, bonus, 0.0) - tl.exp2(z) * factor


@triton.jit
def gradient_kernel(
    logits: tl.tensor,
    labels: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    grad_logprobs: tl.tensor,
    grad_entropy: tl.tensor,
    entropy: tl.tensor,
    out: tl.tensor,
    row_stride: tl.tensor,
    out_stride: tl.tensor,
    shard_size: tl.tensor,
    width: tl.tensor,
    log2_scale: tl.tensor,
    temperature: tl.tensor,
    ROWS: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
) -> None:
    """One row of ``out [n, width]``, which may lie in the bytes of ``logits``: see ``row_kernels_triton.row_gradient``.

    The barrier in each block is what makes that safe: all of a block is read before any of it is written.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    out += row * out_stride
    label = tl.load(labels + row).to(tl.int32)
    m = tl.load(maximum + row)
    s = tl.load(total + row)
    g = tl.load(grad_logprobs + row)
    slope = None
    base = tl.div_rn(g, s * temperature)
    if grad_entropy is not None:
        e = tl.load(grad_entropy + row)
        slope = tl.div_rn(e, s * temperature) * _LN2
        base = tl.div_rn(g + e * (tl.load(entropy + row) - tl.log(s)), s * temperature)
    bonus = tl.div_rn(g, temperature)

    SIZE: tl.constexpr = ROWS * THREADS * VECTOR
    block = _block_offsets(ROWS, THREADS, VECTOR)
    full_blocks = shard_size // SIZE * SIZE
    for start in range(0, full_blocks, SIZE):
        # Nobody reads these logits again: what the cache holds of them should make room for the gradient.
        x = tl.load(logits + start + block, eviction_policy="evict_first").to(tl.float32)
        tl.debug_barrier()
        at_label = _is_at(label - start, ROWS, THREADS, VECTOR)
        grad = _gradient_block(x, at_label, m, base, slope, bonus, log2_scale)
        tl.store(out + start + block, grad.to(out.dtype.element_ty))
    # From here on loads need a mask: the end of the shard, and its padding.
    for start in range(full_blocks, width, SIZE):
        places = start + block
        x = tl.load(logits + places, mask=places < shard_size, other=-float("inf")).to(tl.float32)
        tl.debug_barrier()
        grad = _gradient_block(x, places == label, m, base, slope, bonus, log2_scale)
        grad = tl.where(places < shard_size, grad, 0.0)
        tl.store(out + places, grad.to(out.dtype.element_ty), mask=places < width)
