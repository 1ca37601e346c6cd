"""Replacements in this package and in torch for a rehearsal, each with its reason.

Those in Megatron are in ``megatron_replacements.py``. Assumed values are in ``assumed_values.py``.
"""

import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from megatron_dppo.head import columns, loss, row_kernels, row_plan, stats
from megatron_dppo.mcore import delta_net, forward
from megatron_dppo.mcore.bridge import Bridge
from megatron_dppo.mcore.row import MicroBatchRow
from megatron_dppo_megatron_cpu import grouped_gemm
from megatron_dppo_megatron_cpu.attention import SDPACoreAttention
from megatron_dppo_megatron_cpu.torch_proxy import is_on_device
from megatron_dppo_plan.delta_kernels import REHEARSED_KERNELS
from megatron_dppo_plan.megatron_replacements import REPLACEMENTS as MEGATRON
from megatron_dppo_plan.megatron_replacements import Assumptions, Replacement


def replace_for_rehearsal(assumptions: Assumptions, *, as_gpu: bool) -> None:
    """Apply all replacements, also Megatron's, to this process. They cannot be undone."""
    for replacement in (*MEGATRON, *REPLACEMENTS):
        if as_gpu or not replacement.as_gpu:
            replacement.apply(assumptions)


def _set(owner: Any, name: str, value: object) -> Callable[[Assumptions], None]:
    return lambda _: setattr(owner, name, value)


def _build_rows_on_host(_: Assumptions) -> None:
    def from_batch(*args: Any, **kwargs: Any) -> MicroBatchRow:
        with _disable_current_modes():
            row = MicroBatchRow.from_batch(*args, **kwargs)
            # Computed on first use, which must be here, outside the modes.
            _ = row.packing.buckets
        sampling_mask = () if row.batch.sampling_mask is None else (row.batch.sampling_mask.ids,)
        for column in (*vars(row.batch).values(), *sampling_mask):
            if isinstance(column, Tensor):
                # The meter did not see how the column was created; this operation shows it.
                column.detach()
        return row

    forward.MicroBatchRow = SimpleNamespace(from_batch=from_batch)  # type: ignore[attr-defined, assignment]


def _skip_fake_copies(_: Assumptions) -> None:
    copy = torch.UntypedStorage.copy_

    def copy_(self: torch.UntypedStorage, source: Any, *args: Any, **kwargs: Any) -> Any:
        return self if source.device.type == "meta" else copy(self, source, *args, **kwargs)

    torch.UntypedStorage.copy_ = copy_  # type: ignore[method-assign, assignment]


def _report_cuda(_: Assumptions) -> None:
    def is_cuda(self: FakeTensor) -> bool:
        # torch itself must see a CPU tensor, all other code one on the device that the rehearsal stands for.
        caller = sys._getframe(1)
        return "/torch/" not in caller.f_code.co_filename and is_on_device(caller)

    FakeTensor.is_cuda = property(is_cuda)  # type: ignore[assignment]


def _choose_gpu_chunks(_: Assumptions) -> None:
    device = torch.device("cuda")
    default_chunk_tokens = row_plan.default_chunk_tokens
    chunks_in_flight = row_plan.chunks_in_flight

    def chunk_tokens(rows: int, width: int, _: torch.device, sharing: int = 1) -> int:
        return default_chunk_tokens(rows, width, device, sharing)

    row_plan.default_chunk_tokens = chunk_tokens  # type: ignore[assignment]
    for module in (loss, stats):
        module.chunks_in_flight = lambda _, group: chunks_in_flight(device, group)  # type: ignore[attr-defined]


def _replace_row_kernels(_: Assumptions) -> None:
    def row_statistics(
        logits: Tensor, shard_size: int, labels: Tensor, ids: Tensor | None, temperature: float, squares: bool
    ) -> Tensor:
        # One pass over the logits, for the memory traffic.
        sums = logits.sum(1)
        return sums.new_empty(len(logits), 4 + (0 if ids is None else ids.shape[1]) + squares)

    def row_gradient(logits: Tensor, *args: Any) -> Tensor:
        return args[-1].zero_()

    kernels = SimpleNamespace(row_statistics=row_statistics, row_gradient=row_gradient)
    row_kernels.triton_kernels = lambda logits: kernels  # type: ignore[assignment, return-value]


_META_KERNELS = torch.library.Library("aten", "IMPL")
"""Kept: torch forgets the kernels of a library that is gone."""


def _replace_addmm(_: Assumptions) -> None:
    def addmm(total: Tensor, left: Tensor, right: Tensor, out_dtype: torch.dtype, *, out: Tensor, **_: float) -> Tensor:
        return out

    if not hasattr(torch.ops.aten.addmm, "dtype_out"):
        return  # an older torch, which has no such product
    decomposition_table.pop(torch.ops.aten.addmm.dtype_out, None)
    _META_KERNELS.impl("addmm.dtype_out", addmm, "Meta", allow_override=True)


def _skip_mask_checks(_: Assumptions) -> None:
    for module in (columns, stats):
        module.check_sets = lambda sampling_mask, labels, vocab_size: None  # type: ignore[attr-defined]


def counted_keys(keys: int, window: int | None) -> int:
    """Return the number of keys with which causal attention, half of the pairs, has as many pairs as with a window.

    ``window`` is the number of visible keys before the query's own. None means all.
    """
    if window is None or window + 1 >= keys:
        return keys
    visible = window + 1
    pairs = keys * visible - visible * window // 2
    return min(keys, round(2 * pairs / keys))


class Sinks(torch.autograd.Function):
    """Sinks that a kernel adds to its softmax: they need no memory beyond their gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, sinks: Tensor) -> Tensor:
        """Return the attention's result, which has the sinks already."""
        ctx.save_for_backward(sinks)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the result and of the sinks."""
        return gradients[0], torch.empty_like(ctx.saved_tensors[0])


def _attend_without_mask(_: Assumptions) -> None:
    def attend(self: SDPACoreAttention, query: Tensor, key: Tensor, value: Tensor, positions: Any) -> Tensor:
        sinks, self.softmax_offset = self.softmax_offset, None
        count = counted_keys(key.shape[1], self.window)
        output = self._attend(query, key[:, :count], value[:, :count], None)
        self.softmax_offset = sinks
        return output if sinks is None else Sinks.apply(output, sinks)

    SDPACoreAttention.attend_bucket = attend  # type: ignore[method-assign]


REPLACEMENTS: Sequence[Replacement] = (
    Replacement(
        _replace_addmm,
        "torch 2.11 (seen; 2.13 has not) takes the rule of another overload for addmm(out_dtype, out), and fails",
        True,
    ),
    Replacement(
        _set(Bridge, "load", lambda self, source: None),
        "initial weights are loaded one tensor at a time and add nothing to the peak",
    ),
    Replacement(_build_rows_on_host, "row plans and sequence starts are computed on the host from real tensors"),
    Replacement(_skip_mask_checks, "the check that a mask allows its label reads fake ids"),
    Replacement(_skip_fake_copies, "copying between fake storages keeps both alive in torch"),
    Replacement(
        _report_cuda,
        "fake CUDA tensors cannot be sliced without CUDA, so they are CPU tensors that report CUDA",
        True,
    ),
    Replacement(
        _set(grouped_gemm, "has_grouped_gemm", lambda x, weight: False),
        "one GEMM per expert keeps the same activations as Transformer Engine; torch's grouped one needs a device",
        True,
    ),
    Replacement(
        _attend_without_mask,
        "kernels know the causal mask, windows and sinks: the pairs of visible keys, and no mask in memory",
        True,
    ),
    Replacement(
        _set(delta_net, "choose_kernels", lambda config: REHEARSED_KERNELS),
        "flash-linear-attention's kernels need Triton: the same products, and what they keep",
        True,
    ),
    Replacement(
        _set(Tensor, "pin_memory", lambda self, *args, **kwargs: self),
        "page-locked memory needs a device; the copy is the same",
        True,
    ),
    Replacement(_choose_gpu_chunks, "the head chooses its chunks by the kind of device", True),
    Replacement(
        _replace_row_kernels, "Triton cannot run on fake tensors; its kernels allocate only their results", True
    ),
)
