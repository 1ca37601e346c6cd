"""Batch-invariant CPU kernels: the result for a token is bitwise independent of the other tokens of the batch.

A GEMM chooses its algorithm by the number of rows, and a vectorized function computes the end of a tensor with another
routine. Here GEMMs run in tiles of a fixed number of rows, functions on whole vectors, and attention on tiles of fixed
size, summed from the first key on, so that padding adds exact zeros. That a GEMM of a fixed shape treats all rows alike
is left to the hardware, and checked for each shape on first use. There is one thread per process: several would split
the work depending on its size.
"""

import math
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.errors import UserError
from megatron_dppo_megatron_cpu.attention import SDPACoreAttention

TILE = 32
"""Rows of a GEMM; queries and keys of an attention tile."""
_VECTOR = 64
"""Elements that functions are padded to: a multiple of the width of any vectorized loop."""
_ALIGNMENT = 64
_MIN_COLUMNS = 16
"""Columns that a product is padded to. For fewer, MKL on AMD gives the rows of a tile different bits."""
_FUNCTIONS = ("exp", "exp2", "log", "silu", "sigmoid", "cos", "sin")
_library: torch.library.Library | None = None
_checked: set[tuple[Any, ...]] = set()


def enable_batch_invariant_mode(device: torch.device) -> None:
    """Replace torch's kernels on the CPU by these for the whole process; a second call does nothing."""
    global _library
    if device.type != "cpu":
        raise UserError(
            f"rollout.batch_invariant = true on {device}: its kernels are for the CPU; set it to false, or hide the "
            "GPUs with CUDA_VISIBLE_DEVICES=''"
        )
    if _library is not None:
        return
    torch.set_num_threads(1)
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", _mm, "CPU", allow_override=True)
    library.impl("mm.out", _mm_out, "CPU", allow_override=True)
    library.impl("addmm", _addmm, "CPU", allow_override=True)
    for name in _FUNCTIONS:
        function = _Function(getattr(torch.ops.aten, f"{name}_").default)
        library.impl(name, function, "CPU", allow_override=True)
        library.impl(f"{name}.out", function.into, "CPU", allow_override=True)
    _library = library


def is_batch_invariant_mode_enabled() -> bool:
    """Return True if this process uses these kernels."""
    return _library is not None


def _mm(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left [M, K] @ right [K, N]``."""
    return _tiled(left, right, left.new_empty(left.shape[0], right.shape[1]))


def _mm_out(left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
    return _tiled(left, right, out)


def _addmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = _mm(left, right)
    return beta * bias + (product if alpha == 1 else alpha * product)


def _tiled(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    rows = left.shape[0]
    if not rows or not right.shape[0]:
        return out.zero_()
    columns = right.shape[1]
    if columns < _MIN_COLUMNS:
        wide = right.new_zeros(right.shape[0], _MIN_COLUMNS)
        wide[:, :columns] = right
        return out.copy_(_tiled(left, wide, left.new_empty(rows, _MIN_COLUMNS))[:, :columns])
    left = left.contiguous()
    if left.data_ptr() % _ALIGNMENT or left.shape[1] * left.element_size() * TILE % _ALIGNMENT:
        left = left.clone()
    _check_rows_alike(left, right)
    full_rows = rows // TILE * TILE
    for start in range(0, full_rows, TILE):
        _gemm(left[start : start + TILE], right, out[start : start + TILE])
    # The last tile is filled up with zero rows.
    if full_rows < rows:
        last = left.new_zeros(TILE, left.shape[1])
        last[: rows - full_rows] = left[full_rows:]
        product = out.new_empty(TILE, out.shape[1])
        _gemm(last, right, product)
        out[full_rows:] = product[: rows - full_rows]
    return out


def _gemm(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Compute one tile with torch's ``addmm.out``, which is not replaced and runs the same kernel as ``mm``."""
    torch.ops.aten.addmm.out(out, left, right, beta=0, out=out)


def _check_rows_alike(left: Tensor, right: Tensor) -> None:
    """Check that the GEMM of this shape gives equal rows of a tile bitwise equal results."""
    key = (right.shape, right.stride(0) == 1, left.dtype, _fp32_precision())
    if key in _checked:
        return
    row = torch.rand(left.shape[1], generator=torch.Generator().manual_seed(0)).to(left.dtype)
    product = left.new_empty(TILE, right.shape[1])
    _gemm(row.repeat(TILE, 1), right, product)
    if not torch.equal(product, product[:1].expand_as(product)):
        raise UserError(
            f"rollout.batch_invariant = true: the matrix product [{TILE}, {left.shape[1]}] x {list(right.shape)} in "
            f"{left.dtype} gives equal rows different results on this machine; set it to false"
        )
    _checked.add(key)


def _fp32_precision() -> Any:
    """Return torch's setting for rounding fp32 products to bf16, which the head enables (``mixed_gemm``)."""
    return getattr(getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision", None)


class _Function:
    """Elementwise function on whole vectors, from torch's ``in_place`` operator: the tensor is flattened and padded."""

    def __init__(self, in_place: Any) -> None:
        self._in_place = in_place

    def __call__(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            x = x.to(torch.get_default_dtype())
        flat = x.new_zeros(-(-x.numel() // _VECTOR) * _VECTOR)
        flat[: x.numel()] = x.reshape(-1)
        return self._in_place(flat)[: x.numel()].view(x.shape)

    def into(self, x: Tensor, *, out: Tensor) -> Tensor:
        """Write the result to ``out``."""
        return out.resize_(x.shape).copy_(self(x))


class InvariantCoreAttention(SDPACoreAttention):
    """Causal attention whose result for a query depends only on that query and its visible keys.

    Scores are computed in tiles of ``TILE`` queries and ``TILE`` keys, and summed tile by tile from the first key on,
    in fp32. All scores are in memory at once.
    """

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attend from ``query [B, q, heads, d]`` to ``key, value [B, q, groups, d]``; return the shape of ``query``."""
        assert mask is None, "without context parallelism a query's slot is its position"
        batch, length, heads, size = query.shape
        tiles = -(-length // TILE)
        q, k, v = (_in_tiles(x, heads, tiles) for x in (query, key, value))
        scale = 1 / math.sqrt(size) if self.softmax_scale is None else self.softmax_scale
        future = torch.ones(TILE, TILE, dtype=torch.bool, device=query.device).triu(1)
        # Scores of all tiles, and the largest score of each query, for a stable softmax.
        scores = []
        largest = torch.full(q.shape[:-1], -torch.inf, device=query.device)
        for j in range(tiles):
            tile_scores = _products(q[:, j:], k[:, j : j + 1].expand_as(q[:, j:]).transpose(-1, -2)) * scale
            diagonal = tile_scores[:, :1].masked_fill(future, -torch.inf)
            scores.append(torch.cat([diagonal, tile_scores[:, 1:]], 1))
            largest[:, j:] = torch.maximum(largest[:, j:], scores[j].detach().amax(-1))
        # Softmax numerators times values, and their denominators, summed in the order of the keys.
        total = torch.zeros_like(largest)
        out = torch.zeros_like(q)
        for j in range(tiles):
            share = (scores[j] - largest[:, j:, :, None]).exp()
            weighed = _products(share, v[:, j : j + 1].expand(-1, tiles - j, -1, -1))
            total = torch.cat([total[:, :j], total[:, j:] + share.sum(-1)], 1)
            out = torch.cat([out[:, :j], out[:, j:] + weighed], 1)
        result = (out / total[..., None]).view(batch, heads, tiles * TILE, size)[:, :, :length]
        return result.transpose(1, 2).to(query.dtype)


def _in_tiles(x: Tensor, heads: int, tiles: int) -> Tensor:
    """Convert ``[B, s, groups, d]`` to fp32 ``[B * heads, tiles, TILE, d]``, padded with zeros."""
    batch, length, groups, size = x.shape
    padded = torch.nn.functional.pad(x.float().transpose(1, 2), (0, 0, 0, tiles * TILE - length))
    return padded.repeat_interleave(heads // groups, 1).reshape(batch * heads, tiles, TILE, size)


def _products(left: Tensor, right: Tensor) -> Tensor:
    """Return the products ``[n, m, TILE, a] @ [n, m, a, b]``, all of one shape."""
    n, m = left.shape[:2]
    products = torch.bmm(left.reshape(n * m, *left.shape[2:]), right.reshape(n * m, *right.shape[2:]))
    return products.view(n, m, *products.shape[1:])
