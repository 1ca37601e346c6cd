"""What a rehearsal replaces in this package and in torch's fake tensors, each with its reason.

Megatron's part is in ``mcore/rehearsal.py``, what is answered where values are read in ``answers.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from megatron_dppo.head import columns, loss, row_kernels, row_plan, stats
from megatron_dppo.mcore import forward
from megatron_dppo.mcore.bridge import Bridge
from megatron_dppo.mcore.compat import grouped_gemm
from megatron_dppo.mcore.compat.torch_proxy import is_on_device
from megatron_dppo.mcore.rehearsal import REPLACEMENTS as MEGATRON
from megatron_dppo.mcore.rehearsal import Assumptions, Replacement
from megatron_dppo.mcore.row import MicroBatchRow


def replace_for_rehearsal(assumed: Assumptions, *, as_gpu: bool) -> None:
    """Apply the replacements, Megatron's too, for the rest of the process."""
    for replacement in (*MEGATRON, *REPLACEMENTS):
        if as_gpu or not replacement.as_gpu:
            replacement.apply(assumed)


def _weights(_: Assumptions) -> None:
    Bridge.load = lambda self, source: None  # type: ignore[method-assign]


def _rows_on_the_host(_: Assumptions) -> None:
    def from_batch(*args: Any, **kwargs: Any) -> MicroBatchRow:
        with _disable_current_modes():
            row = MicroBatchRow.from_batch(*args, **kwargs)
            _ = row.packing.buckets
        sampling_mask = () if row.batch.sampling_mask is None else (row.batch.sampling_mask.ids,)
        for column in (*vars(row.batch).values(), *sampling_mask):
            if isinstance(column, Tensor):
                column.detach()  # for the meter, which has not seen how it was made
        return row

    forward.MicroBatchRow = SimpleNamespace(from_batch=from_batch)  # type: ignore[attr-defined, assignment]


def _contents(_: Assumptions) -> None:
    copy = torch.UntypedStorage.copy_

    def copy_(self: torch.UntypedStorage, source: Any, *args: Any, **kwargs: Any) -> Any:
        return self if source.device.type == "meta" else copy(self, source, *args, **kwargs)

    torch.UntypedStorage.copy_ = copy_  # type: ignore[method-assign, assignment]


def _is_cuda(_: Assumptions) -> None:
    def is_cuda(self: FakeTensor) -> bool:
        del self
        asking = sys._getframe(1)
        return "/torch/" not in asking.f_code.co_filename and is_on_device(asking)

    FakeTensor.is_cuda = property(is_cuda)  # type: ignore[assignment]


def _chunks(_: Assumptions) -> None:
    device, default, in_flight = torch.device("cuda"), row_plan.default_chunk_tokens, row_plan.chunks_in_flight

    def chunk_tokens(rows: int, width: int, _: torch.device, sharing: int = 1) -> int:
        return default(rows, width, device, sharing)

    row_plan.default_chunk_tokens = chunk_tokens  # type: ignore[assignment]
    for module in (loss, stats):
        module.chunks_in_flight = lambda _, group: in_flight(device, group)  # type: ignore[attr-defined]


def _row_kernels(_: Assumptions) -> None:
    def row_statistics(
        logits: Tensor, own: int, labels: Tensor, ids: Tensor | None, temperature: float, squares: bool
    ) -> Tensor:
        del own, labels, temperature
        read = logits.sum(1)  # one pass over the logits, for the memory traffic
        return read.new_empty(len(logits), 4 + (0 if ids is None else ids.shape[1]) + squares)

    def row_gradient(logits: Tensor, *args: Any) -> Tensor:
        del logits
        return args[-1].zero_()

    kernels = SimpleNamespace(row_statistics=row_statistics, row_gradient=row_gradient)
    row_kernels._triton_kernels = lambda logits: kernels  # type: ignore[assignment, return-value]


def _page_locked(_: Assumptions) -> None:
    Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def _sampling_masks(_: Assumptions) -> None:
    for module in (columns, stats):
        module.check_sets = lambda sampling_mask, labels, vocab_size: None  # type: ignore[attr-defined]


def _experts(_: Assumptions) -> None:
    grouped_gemm.has_grouped_gemm = lambda x, weight: False


REPLACEMENTS: Sequence[Replacement] = (
    Replacement(_weights, "the initial weights are not read: one tensor at a time passes, and nothing of it stays"),
    Replacement(_rows_on_the_host, "row plans and sequence starts are found on the host, from real tensors"),
    Replacement(_sampling_masks, "the check asks which sets hold their label, by fake ids and real counts"),
    Replacement(_contents, "torch keeps both storages when it copies what fake ones do not have"),
    Replacement(
        _is_cuda,
        "fake CUDA tensors cannot be sliced where torch has no CUDA: these are the CPU's and say otherwise",
        True,
    ),
    Replacement(
        _experts,
        "one GEMM an expert, which keeps what Transformer Engine's does; torch's grouped one is asked of a device",
        True,
    ),
    Replacement(_page_locked, "page-locked memory needs a device; the copy from it is the same", True),
    Replacement(_chunks, "the head cuts its chunks by the kind of device", True),
    Replacement(
        _row_kernels, "Triton cannot run on fake tensors; its kernels allocate their results and no more", True
    ),
)
