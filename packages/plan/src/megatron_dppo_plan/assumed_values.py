"""Values and sizes that a rehearsal assumes where the program reads data of the device.

Fake tensors have shapes and no values. The two tables list every call site that reads a value, and every operation
whose output size depends on data. Any other read stops the rehearsal and names its line. Operations on real tensors
alone (a row's token ids, sequence starts, routes) are computed as usual.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from megatron_dppo.errors import PlanError


@dataclass(frozen=True)
class CallSite:
    """Function of the program that reads data."""

    file: str
    """End of the file's path."""
    function: str

    def is_at(self, frame: FrameType) -> bool:
        """Return True if the frame is of this function."""
        code = frame.f_code
        return code.co_name == self.function and code.co_filename.endswith(self.file)


@dataclass(frozen=True)
class ValueRead(CallSite):
    """Call site that reads a value."""

    assume: float | Callable[[FrameType, Tensor], float]
    """Assumed value, or a function to it from the calling frame and the read element."""
    reason: str
    """Reason why the assumption is correct."""


def _row_shape(frame: FrameType, element: Tensor) -> float:
    shape: Sequence[int] = frame.f_locals["self"].rehearsed_shape
    # The offset of the element tells which of the three sizes is read.
    return shape[int(element.storage_offset())]


VALUE_READS: Sequence[ValueRead] = (
    # On CUDA the device asserts these.
    ValueRead("head/gradient.py", "check_rest", False, "rows without a gradient have none"),
    ValueRead("head/checks.py", "_assert_distinct", False, "the ids of a row are distinct"),
    ValueRead("head/checks.py", "check_slots", False, "the label is in exactly one slot"),
    ValueRead("head/gradient.py", "_check_one", 1.0, "Megatron's scale of the loss is 1 without fp16"),
    ValueRead("head/gradient.py", "_scaled", 1.0, "the same scale"),
    ValueRead("report/metrics.py", "_to_floats", 1.0, "metrics do not affect the update"),
    ValueRead("mcore/router_replay.py", "metrics", 1, "counts do not affect the update"),
    ValueRead("optimizer/clip_grads.py", "get_grad_norm_fp32", 1.0, "the norm is finite; other steps are skipped"),
    ValueRead("optimizer/optimizer.py", "_unscale_main_grads_and_check_for_nan", 0.0, "no gradient is infinite"),
    ValueRead("distributed/finalize_model_grads.py", "finalize_model_grads", True, "a batch has tokens with a loss"),
    ValueRead("mcore/layer_noise.py", "call", 1, "the same count"),
    ValueRead("mcore/layer_noise.py", "step", 1.0, "metrics do not affect the update"),
    ValueRead("pipeline_parallel/p2p_communication.py", "_communicate_shapes", _row_shape, "all rows are full"),
)


@dataclass(frozen=True)
class DataDependentSize(CallSite):
    """Call site of an operation whose output size depends on data."""

    operation: str
    count: Callable[[FrameType], int]
    reason: str


DATA_DEPENDENT_SIZES: Sequence[DataDependentSize] = (
    DataDependentSize(
        "moe/moe_utils.py",
        "permute",
        "aten::masked_select",
        lambda frame: int(frame.f_locals["num_out_tokens"]),
        "without token dropping every token is routed to exactly k experts",
    ),
    DataDependentSize(
        "megatron_dppo_plan/megatron_replacements.py",
        "dispatch_postprocess",
        "aten::masked_select",
        lambda frame: int(frame.f_locals["arriving"]),
        "the probabilities of exactly the tokens that arrive",
    ),
    DataDependentSize(
        "moe/moe_utils.py",
        "unpermute",
        "aten::masked_select",
        lambda frame: int(frame.f_locals["sorted_indices"].shape[0]),
        "the same tokens in the opposite direction",
    ),
)
_WITHOUT_FAKE = (
    "c10d::reduce_scatter_tensor_coalesced_",
    "c10d::allgather_into_tensor_coalesced_",
    "c10d::allreduce_coalesced_",
)
"""Collectives without a fake implementation in torch. They write to existing tensors."""


class AssumedValues(TorchDispatchMode):
    """Dispatch mode above a ``FakeTensorMode`` that applies the two tables and computes real tensors for real."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, or return what the tables assume."""
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
        name = func._schema.name
        # Real inputs only: run outside all modes, so that the results are real as well.
        if tensors and func.namespace != "c10d" and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with _disable_current_modes():
                return func(*args, **kwargs)
        # A fake tensor that was made from a Python number knows its value.
        if name == "aten::_local_scalar_dense" and tensors[0].constant is None:  # type: ignore[attr-defined]
            frame = _calling_frame()
            for read in VALUE_READS:
                if read.is_at(frame):
                    return read.assume(frame, tensors[0]) if callable(read.assume) else read.assume
            raise _unknown_value_error("a value of the device")
        if torch.Tag.data_dependent_output in func.tags and name != "aten::_local_scalar_dense":
            raise _unknown_value_error(f"{name}, whose result depends on data")
        if torch.Tag.dynamic_output_shape in func.tags and not (name == "aten::index" and _has_static_shape(args[1])):
            return _sized_output(name, args)
        if name in _WITHOUT_FAKE:
            return FakeWork().boxed()
        return func(*args, **kwargs)


def _has_static_shape(indices: Sequence[Tensor | None]) -> bool:
    """Return True if the size of ``tensor[indices]`` does not depend on the values of the indices."""
    return all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in indices)


def _sized_output(name: str, args: Sequence[Any]) -> Tensor:
    frame = _calling_frame()
    for size in DATA_DEPENDENT_SIZES:
        if size.operation == name and size.is_at(frame):
            return args[0].new_empty(size.count(frame))
    raise _unknown_value_error(f"{name}, whose size depends on data")


INTERMEDIATE_FILES = (
    "/torch/",
    "megatron_dppo_plan/assumed_values.py",
    "megatron_dppo_plan/meter.py",
    "megatron_dppo_megatron_cpu/torch_proxy.py",
)


def _calling_frame() -> FrameType:
    """Return the innermost frame outside torch and the dispatch modes: the one that reads."""
    frame = sys._getframe(1)
    while any(part in frame.f_code.co_filename for part in INTERMEDIATE_FILES) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _unknown_value_error(what: str) -> PlanError:
    frame = _calling_frame()
    location = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
    return PlanError(
        f"Cannot rehearse {location}: it reads {what}. Fix: add this call site to "
        "packages/plan/src/megatron_dppo_plan/assumed_values.py"
    )
