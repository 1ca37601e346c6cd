"""The three GEMMs of the head: bf16 or fp16 products, added up in fp32.

On CUDA ``mm(out_dtype=float32)`` does it. On the CPU torch has no such GEMM, so the logits come from a float32 GEMM
over a block of the weight at a time, converted in the cache. For bf16 numbers oneDNN may use bf16 instructions: the
products are exact either way. The weight's gradient of a part of the rows may be rounded to bf16 before it is added.
"""

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

BLOCK_ENTRIES = 1 << 20
"""Size of a block of the weight while it is converted on the CPU: 4 MB in float32."""


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """Return float64 for a float64 tensor, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def is_half(dtype: torch.dtype) -> bool:
    """Return True for bf16 and fp16, whose products are added up in fp32."""
    return dtype in (torch.bfloat16, torch.float16)


@functools.cache
def bf16_products_are_fast() -> bool:
    """Return True if this processor multiplies bf16 matrices faster than float32 ones.

    It needs AMX, or AVX512-BF16 on AMD. On Intel without AMX torch's bf16 product takes 1.3 to 1.9 times as long as the
    float32 one (measured on a Xeon of model 207, torch 2.13.0).
    """
    # torch.cpu has it from 2.7 on.
    capabilities: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    is_amd = "AMD" in str(capabilities.get("cpu_name"))
    return bool(capabilities.get("amx_bf16")) or bool(capabilities.get("avx512_bf16") and is_amd)


@contextmanager
def _allow_bf16_products(dtype: torch.dtype) -> Iterator[None]:
    """Let float32 GEMMs on the CPU round their inputs to bf16, for inputs that are bf16 numbers anyway."""
    setting = getattr(torch.backends.mkldnn, "matmul", None)
    if setting is None or dtype != torch.bfloat16:
        yield
        return
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before


def _block_rows(weight: Tensor) -> int:
    """Return how many rows of ``weight [W, H]`` are converted at a time."""
    rows, columns = weight.shape
    return min(rows, max(64, BLOCK_ENTRIES // max(columns, 1)))


def _blocks(weight: Tensor) -> Iterator[slice]:
    rows, step = len(weight), _block_rows(weight)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def logits_into(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Write ``hidden [n, H] @ weight [W, H].T + bias [W]`` to ``out [n, W]``, in the accumulation dtype."""
    if not is_half(hidden.dtype):
        torch.mm(hidden, weight.t(), out=out)
    elif hidden.is_cuda:
        torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=out)
    else:
        rows = hidden.float()
        # One buffer for all blocks: fresh memory for each would cost more in page faults than the product.
        buffer = torch.empty(_block_rows(weight), weight.shape[1])
        with _allow_bf16_products(hidden.dtype):
            for block in _blocks(weight):
                converted = buffer[: block.stop - block.start].copy_(weight[block])
                torch.mm(rows, converted.t(), out=out[:, block])
    return out if bias is None else out.add_(bias)


class WeightGradient:
    """Sum over chunks of ``dlogits.T @ hidden`` for the ``weight [W, H]``, in fp32 (fp64 for fp64).

    A single chunk needs no fp32 buffer. ``into`` is an fp32 tensor to add to instead (``weight.main_grad``).
    ``rounded``: on the CPU multiply bf16 factors as bf16 and round each chunk's product to bf16 before it is added. The
    relative error is 2e-3, as that of ``weight.grad`` from autograd.
    """

    def __init__(self, weight: Tensor, chunks: int, into: Tensor | None = None, *, rounded: bool = False) -> None:
        self._weight = weight
        self._rounded = rounded and weight.dtype == torch.bfloat16
        self._sum = into
        self._added_elsewhere = into is not None
        # A single product needs no running sum in fp32.
        self._single = chunks == 1 and into is None

    def add(self, dlogits: Tensor, hidden: Tensor) -> None:
        """Add one chunk: ``dlogits [n, W]`` and ``hidden [n, H]`` in the dtype of the weight."""
        if self._single:
            self._sum = torch.mm(dlogits.t(), hidden)
            return
        beta = 1.0
        if self._sum is None:
            # beta = 0 ignores what is in a new buffer, so it is never cleared.
            beta = 0.0
            self._sum = torch.empty_like(self._weight, dtype=accumulation_dtype(self._weight))
        if dlogits.dtype == self._sum.dtype:
            torch.addmm(self._sum, dlogits.t(), hidden, beta=beta, out=self._sum)
        elif dlogits.is_cuda:
            torch.addmm(self._sum, dlogits.t(), hidden, out_dtype=self._sum.dtype, beta=beta, out=self._sum)
        else:
            add = _add_rounded_blocks if self._rounded else _add_blocks
            add(self._sum, dlogits, hidden, beta)

    def result(self) -> Tensor | None:
        """Return the gradient in the dtype of the weight, 0 without any chunk. None if it was added elsewhere."""
        if self._added_elsewhere:
            return None
        return torch.zeros_like(self._weight) if self._sum is None else self._sum.to(self._weight.dtype)


def _add_blocks(total: Tensor, dlogits: Tensor, hidden: Tensor, beta: float) -> None:
    """Compute ``total = beta total + dlogits.T @ hidden`` on the CPU; factors are bf16 or fp16, total [W, H] fp32."""
    rows, step = hidden.float(), BLOCK_ENTRIES // max(len(hidden), 1)
    with _allow_bf16_products(hidden.dtype):
        for start in range(0, len(total), max(64, step)):
            block = slice(start, start + max(64, step))
            torch.addmm(total[block], dlogits[:, block].float().t(), rows, beta=beta, out=total[block])


def _add_rounded_blocks(total: Tensor, dlogits: Tensor, hidden: Tensor, beta: float) -> None:
    """Compute ``_add_blocks`` by bf16 products, which are rounded to bf16 before they are added."""
    step = _block_rows(total)
    # The product of a block is added while it is in the cache.
    buffer = hidden.new_empty(step, hidden.shape[1])
    for block in _blocks(total):
        product = torch.mm(dlogits[:, block].t(), hidden, out=buffer[: block.stop - block.start])
        if beta:
            total[block].add_(product)
        else:
            total[block].copy_(product)
