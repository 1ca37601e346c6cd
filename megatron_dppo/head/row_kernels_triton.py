"""The two row passes of the head on CUDA: what a shard's logits contribute to the statistics, and their gradient.

Semantics are those of ``row_kernels``, whose plain torch versions are the oracle; the kernels are in
``triton_kernels``. Both passes are bound by memory: the logits are read once, the gradient is written once. No atomics,
so the result does not depend on scheduling.

The sizes are fixed, for an H100 or H200: 132 multiprocessors that each get 12 or 16 bytes a cycle from memory.

- 4 warps a row. At no more than 64 registers a thread at least 8 rows share a multiprocessor: 1056 rows at once, so a
  chunk of 1024 rows is one wave, and enough bytes are on their way to fill the memory's latency. With more warps a row
  the search for the next id, in which every warp takes part, would cost more.
- 16 entries a thread in each block, 2048 a block: one rescaling for 16 entries, 2 or 4 independent loads of 16 bytes.
- Only a block that holds an id of the set compares its entries with that id: at most K + 1 comparisons with a block in
  a row, whatever the order of the ids, where comparing every entry with every id would be K of them for each block.
"""

import math

import torch
from torch import Tensor

from megatron_dppo.head.triton_kernels import gradient_kernel, statistics_kernel

NUM_WARPS = 4
_ENTRIES = 16
"""Entries of a block per thread."""
_VECTOR_BYTES = 16
_LEAST_IDS = 16
"""Fewer slots are padded to this number, so that few kernels are compiled."""


def constants(dtype: torch.dtype) -> dict[str, int]:
    """Return the compile-time constants of both kernels for logits of this dtype."""
    vector = _VECTOR_BYTES // dtype.itemsize
    return {"ROWS": _ENTRIES // vector, "THREADS": 32 * NUM_WARPS, "VECTOR": vector}


def id_slots(num_ids: int) -> int:
    """Return the compile-time number of id slots: the power of 2 that holds ``num_ids``, 0 without any."""
    return max(_LEAST_IDS, 1 << (num_ids - 1).bit_length()) if num_ids else 0


def row_statistics(
    logits: Tensor, shard_size: int, labels: Tensor, ids: Tensor | None, temperature: float, squares: bool = False
) -> Tensor:
    """Return ``row_kernels.row_statistics``, fp32, of fp32, bf16 or fp16 logits with contiguous rows.

    The ids are in any order. The third column is added up and not subtracted. A row with a NaN gives NaN, but for the
    -inf of what is not of this shard.
    """
    _check_logits(logits, shard_size, labels)
    num_ids = 0
    if ids is not None:
        if ids.dim() != 2 or len(ids) != len(logits) or ids.dtype != torch.int64:
            raise ValueError(f"row_statistics: expected int64 ids [{len(logits)}, K], got {ids.dtype} {[*ids.shape]}")
        num_ids = ids.shape[1]
    out = logits.new_empty(len(logits), 4 + num_ids + squares, dtype=torch.float32)
    if len(logits):
        with torch.cuda.device_of(logits):
            statistics_kernel[(len(logits),)](
                logits,
                labels.contiguous(),
                ids.contiguous() if ids is not None and num_ids else None,
                out,
                logits.stride(0),
                shard_size,
                num_ids,
                math.log2(math.e) / temperature,
                float(temperature),
                IDS=id_slots(num_ids),
                SQUARES=squares,
                **constants(logits.dtype),
                num_warps=NUM_WARPS,
            )
    return out


def row_gradient(
    logits: Tensor,
    shard_size: int,
    labels: Tensor,
    maximum: Tensor,
    total: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    entropy: Tensor | None,
    temperature: float,
    out: Tensor,
) -> Tensor:
    """Write ``row_kernels.row_gradient`` to ``out`` (bf16, fp16 or the dtype of ``logits``) and return it.

    ``out`` may share the storage of ``logits``: be ``logits`` itself, or a bf16 or fp16 view of the bytes of fp32
    logits whose rows start where theirs do (stride 2 W). The kernel walks a row from its first block to its last. The
    gradient of block [a, b) takes no more bytes an entry than the logits, so it ends before the logits of entry b
    begin, and all entries before b have been read: in earlier blocks, or in this one before a barrier of the row's
    threads. So a write never passes a read. No other program touches the row. The other vectors are fp32 ``[n]``.
    """
    _check_logits(logits, shard_size, labels)
    _check_out(logits, out)
    if grad_entropy is not None and entropy is None:
        raise ValueError("row_gradient: grad_entropy needs entropy, which is None")
    vectors = [maximum, total, grad_logprobs, grad_entropy, None if grad_entropy is None else entropy]
    for vector in vectors:
        if vector is not None and (vector.shape != labels.shape or vector.dtype != torch.float32):
            raise ValueError(f"row_gradient: expected fp32 [{len(logits)}], got {vector.dtype} {[*vector.shape]}")
    if len(logits):
        with torch.cuda.device_of(logits):
            gradient_kernel[(len(logits),)](
                logits,
                labels.contiguous(),
                *(None if vector is None else vector.contiguous() for vector in vectors),
                out,
                logits.stride(0),
                out.stride(0),
                shard_size,
                logits.shape[1],
                math.log2(math.e) / temperature,
                float(temperature),
                **constants(logits.dtype),
                num_warps=NUM_WARPS,
            )
    return out


def _check_logits(logits: Tensor, shard_size: int, labels: Tensor) -> None:
    if logits.dim() != 2 or logits.dtype not in (torch.float32, torch.bfloat16, torch.float16) or logits.stride(1) != 1:
        raise ValueError(
            "row kernels: expected fp32, bf16 or fp16 logits [n, W] with contiguous rows, "
            f"got {logits.dtype} {[*logits.shape]}, strides {logits.stride()}"
        )
    if not 0 <= shard_size <= logits.shape[1]:
        raise ValueError(f"row kernels: shard_size = {shard_size} entries do not fit logits {[*logits.shape]}")
    if labels.shape != logits.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(f"row kernels: expected int64 labels [{len(logits)}], got {labels.dtype} {[*labels.shape]}")


def _check_out(logits: Tensor, out: Tensor) -> None:
    if (
        out.shape != logits.shape
        or out.dtype not in (logits.dtype, torch.bfloat16, torch.float16)
        or out.stride(1) != 1
    ):
        raise ValueError(
            f"row_gradient: expected bf16, fp16 or {logits.dtype} out {[*logits.shape]} with contiguous rows, "
            f"got {out.dtype} {[*out.shape]}, strides {out.stride()}"
        )
    row_bytes = [tensor.stride(0) * tensor.element_size() for tensor in (logits, out)]
    ends = [t.data_ptr() + stride * len(t) for t, stride in zip((logits, out), row_bytes, strict=True)]
    apart = ends[0] <= out.data_ptr() or ends[1] <= logits.data_ptr()
    if not apart and (logits.data_ptr() != out.data_ptr() or row_bytes[0] != row_bytes[1]):
        raise ValueError(
            "row_gradient: out shares the memory of the logits, but its rows do not start where theirs do: "
            f"{row_bytes[1]} bytes a row against {row_bytes[0]}, {out.data_ptr() - logits.data_ptr()} bytes apart"
        )
