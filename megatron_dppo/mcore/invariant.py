"""CPU kernels whose result for a token does not depend on what else is computed with it, to the bit.

A GEMM picks its algorithm by the number of rows, and a vectorised function computes the last numbers of a tensor with
another routine than the others. So the same token of the same weights gets other last bits in a batch of 7 than in one
of 700. Here GEMMs run in tiles of a fixed number of rows, functions on whole vectors, and attention on tiles of fixed
size, added up from the first key on: padding adds exact zeros. What is left to the hardware, that a GEMM of a fixed
shape treats all of its rows alike, is checked for each shape the first time that it is used.

It holds for one thread a process: several would split the work at places that depend on its size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.errors import UserError
from megatron_dppo.mcore.compat.attention import SDPACoreAttention

TILE = 32
"""Rows of a GEMM; keys and queries of a tile of attention"""
_VECTOR = 64
"""Numbers, a multiple of what any vectorised loop takes at once"""
_ALIGNED = 64
"""Bytes, to which torch aligns new tensors"""
_WIDE = 16
"""Columns of a product at least. Narrower ones are filled up with zeros: for them the GEMM of some processors (MKL on
AMD's) gives the rows of a tile different bits"""
_FUNCTIONS = ("exp", "exp2", "log", "silu", "sigmoid", "cos", "sin")
_library: torch.library.Library | None = None
_checked: set[tuple[Any, ...]] = set()


def enable_batch_invariant_mode(device: torch.device) -> None:
    """Put these kernels in the place of torch's own, for the whole process; a no-op on a second call.

    Raises:
        UserError: the device is not the CPU.
    """
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
    """Whether this process has these kernels."""
    return _library is not None


def _mm(left: Tensor, right: Tensor) -> Tensor:
    """``left [M, K] @ right [K, N]``."""
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
    if columns < _WIDE:
        wide = right.new_zeros(right.shape[0], _WIDE)
        wide[:, :columns] = right
        return out.copy_(_tiled(left, wide, left.new_empty(rows, _WIDE))[:, :columns])
    left = left.contiguous()
    if left.data_ptr() % _ALIGNED or left.shape[1] * left.element_size() * TILE % _ALIGNED:
        left = left.clone()
    _check_rows_alike(left, right)
    whole = rows // TILE * TILE
    for start in range(0, whole, TILE):
        _gemm(left[start : start + TILE], right, out[start : start + TILE])
    if whole < rows:
        last = left.new_zeros(TILE, left.shape[1])
        last[: rows - whole] = left[whole:]
        found = out.new_empty(TILE, out.shape[1])
        _gemm(last, right, found)
        out[whole:] = found[: rows - whole]
    return out


def _gemm(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Torch's own, of a whole tile; ``mm`` and this are the same kernel, and only the other one is replaced."""
    torch.ops.aten.addmm.out(out, left, right, beta=0, out=out)


def _check_rows_alike(left: Tensor, right: Tensor) -> None:
    """The GEMM of this shape gives the same bits in each row of a tile, for the same numbers in it.

    Raises:
        UserError: it does not.
    """
    key = (right.shape, right.stride(0) == 1, left.dtype, _fp32_precision())
    if key in _checked:
        return
    row = torch.rand(left.shape[1], generator=torch.Generator().manual_seed(0)).to(left.dtype)
    found = left.new_empty(TILE, right.shape[1])
    _gemm(row.repeat(TILE, 1), right, found)
    if not torch.equal(found, found[:1].expand_as(found)):
        raise UserError(
            f"rollout.batch_invariant = true: the matrix product [{TILE}, {left.shape[1]}] x {list(right.shape)} in "
            f"{left.dtype} gives equal rows different results on this machine; set it to false"
        )
    _checked.add(key)


def _fp32_precision() -> Any:
    """Whether fp32 products may be rounded to bf16, which the head allows for bf16 numbers (``mixed_gemm``)."""
    return getattr(getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision", None)


class _Function:
    """A function of each number on whole vectors: the tensor is laid out flat and filled up.

    Args:
        in_place: torch's own operator that writes over its argument, which stays as it is.
    """

    def __init__(self, in_place: Any) -> None:
        self._in_place = in_place

    def __call__(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            x = x.to(torch.get_default_dtype())
        flat = x.new_zeros(-(-x.numel() // _VECTOR) * _VECTOR)
        flat[: x.numel()] = x.reshape(-1)
        return self._in_place(flat)[: x.numel()].view(x.shape)

    def into(self, x: Tensor, *, out: Tensor) -> Tensor:
        """The same, written to ``out``."""
        return out.resize_(x.shape).copy_(self(x))


class InvariantCoreAttention(SDPACoreAttention):
    """Causal attention whose result for a query depends on that query and the keys that it sees alone.

    Scores are computed for tiles of ``TILE`` queries and ``TILE`` keys, and added up tile by tile from the first key
    on, in fp32. Memory is that of all scores.
    """

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """``query [batch, q, heads, d]``, ``key, value [batch, q, groups, d]`` to the shape of ``query``."""
        assert mask is None, "without context parallelism a query's slot is its position"
        batch, length, heads, size = query.shape
        tiles = -(-length // TILE)
        q, k, v = (_in_tiles(x, heads, tiles) for x in (query, key, value))
        scale = 1 / math.sqrt(size) if self.softmax_scale is None else self.softmax_scale
        future = torch.ones(TILE, TILE, dtype=torch.bool, device=query.device).triu(1)
        scores, largest = [], torch.full(q.shape[:-1], -torch.inf, device=query.device)
        for j in range(tiles):
            found = _products(q[:, j:], k[:, j : j + 1].expand_as(q[:, j:]).transpose(-1, -2)) * scale
            diagonal = found[:, :1].masked_fill(future, -torch.inf)
            scores.append(torch.cat([diagonal, found[:, 1:]], 1))
            largest[:, j:] = torch.maximum(largest[:, j:], scores[j].detach().amax(-1))
        total, out = torch.zeros_like(largest), torch.zeros_like(q)
        for j in range(tiles):
            share = (scores[j] - largest[:, j:, :, None]).exp()
            weighed = _products(share, v[:, j : j + 1].expand(-1, tiles - j, -1, -1))
            total = torch.cat([total[:, :j], total[:, j:] + share.sum(-1)], 1)
            out = torch.cat([out[:, :j], out[:, j:] + weighed], 1)
        found = (out / total[..., None]).view(batch, heads, tiles * TILE, size)[:, :, :length]
        return found.transpose(1, 2).to(query.dtype)


def _in_tiles(x: Tensor, heads: int, tiles: int) -> Tensor:
    """``[batch, s, groups, d]`` to fp32 ``[batch * heads, tiles, TILE, d]``, zeros at the end."""
    batch, length, groups, size = x.shape
    padded = torch.nn.functional.pad(x.float().transpose(1, 2), (0, 0, 0, tiles * TILE - length))
    return padded.repeat_interleave(heads // groups, 1).reshape(batch * heads, tiles, TILE, size)


def _products(left: Tensor, right: Tensor) -> Tensor:
    """``[n, m, TILE, a] @ [n, m, a, b]``, each of the same shape as any other."""
    n, m = left.shape[:2]
    found = torch.bmm(left.reshape(n * m, *left.shape[2:]), right.reshape(n * m, *right.shape[2:]))
    return found.view(n, m, *found.shape[1:])
