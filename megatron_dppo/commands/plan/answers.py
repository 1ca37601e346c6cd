"""What a rehearsal answers where the program reads a value of the device, or where a size depends on data.

Fake tensors have shapes and no values. ``READS`` names every place that asks for a value, with the answer and why it
is the right one; ``SIZES`` every operation whose result has as many elements as the data say. At any other place a
rehearsal stops, with the line that asks. What is computed from real tensors alone (a row's token ids, its sequence
starts, its routes) is computed as always.
"""

from __future__ import annotations

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


@dataclass(frozen=True, kw_only=True)
class CallSite:
    """A function of the program."""

    file: str
    """end of its path"""
    function: str
    reason: str
    """why the answer for it is right"""

    def is_at(self, frame: FrameType) -> bool:
        """Whether the frame is of this function."""
        code = frame.f_code
        return code.co_name == self.function and code.co_filename.endswith(self.file)


@dataclass(frozen=True, kw_only=True)
class ValueRead(CallSite):
    """One place that reads a value."""

    answer: Callable[[FrameType, Tensor], float]
    """by the frame of the place and the element that is read"""


def _always(value: float) -> Callable[[FrameType, Tensor], float]:
    return lambda frame, element: value


def _row_shape(frame: FrameType, element: Tensor) -> float:
    shape: Sequence[int] = frame.f_locals["self"].rehearsed_shape
    return shape[int(element.storage_offset())]


READS: Sequence[ValueRead] = (
    ValueRead(
        file="head/gradient.py",
        function="check_rest",
        answer=_always(False),
        reason="no row without gradient has one; on CUDA the device asserts it and nobody reads",
    ),
    ValueRead(
        file="head/checks.py",
        function="_assert_distinct",
        answer=_always(False),
        reason="the ids of a row are distinct; on CUDA the device asserts it and nobody reads",
    ),
    ValueRead(
        file="head/checks.py",
        function="check_slots",
        answer=_always(False),
        reason="the label has its one place; on CUDA the device asserts it and nobody reads",
    ),
    ValueRead(
        file="head/gradient.py",
        function="_check_one",
        answer=_always(1.0),
        reason="Megatron's scale of the loss is 1 without fp16; on CUDA the device asserts it",
    ),
    ValueRead(file="head/gradient.py", function="_scaled", answer=_always(1.0), reason="the same number"),
    ValueRead(file="report/metrics.py", function="_to_floats", answer=_always(1.0), reason="metrics are for the eye"),
    ValueRead(file="mcore/router_replay.py", function="metrics", answer=_always(1), reason="counts for the eye"),
    ValueRead(
        file="optimizer/clip_grads.py",
        function="get_grad_norm_fp32",
        answer=_always(1.0),
        reason="the norm is finite: a step with another norm is skipped",
    ),
    ValueRead(
        file="optimizer/optimizer.py",
        function="_unscale_main_grads_and_check_for_nan",
        answer=_always(0.0),
        reason="no gradient is infinite",
    ),
    ValueRead(
        file="distributed/finalize_model_grads.py",
        function="finalize_model_grads",
        answer=_always(True),
        reason="a batch has tokens in its loss",
    ),
    ValueRead(file="mcore/layer_noise.py", function="call", answer=_always(1), reason="the same count"),
    ValueRead(file="mcore/layer_noise.py", function="step", answer=_always(1.0), reason="metrics are for the eye"),
    ValueRead(
        file="pipeline_parallel/p2p_communication.py",
        function="_communicate_shapes",
        answer=_row_shape,
        reason="the neighbour's rows are as long as this rank's: all are rehearsed as full",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Size(CallSite):
    """One operation whose result has as many elements as the data say."""

    operation: str
    count: Callable[[FrameType], int]


SIZES: Sequence[Size] = (
    Size(
        file="moe/moe_utils.py",
        function="permute",
        operation="aten::masked_select",
        count=lambda frame: int(frame.f_locals["num_out_tokens"]),
        reason="without dropping every token visits exactly k experts",
    ),
    Size(
        file="moe/moe_utils.py",
        function="unpermute",
        operation="aten::masked_select",
        count=lambda frame: int(frame.f_locals["sorted_indices"].shape[0]),
        reason="the same tokens on their way back",
    ),
)


_WITHOUT_FAKE = frozenset({"c10d::reduce_scatter_tensor_coalesced_", "c10d::allgather_into_tensor_coalesced_"})
"""Collectives that torch has no fake version of; they write to tensors that are there."""


class Answers(TorchDispatchMode):
    """Entered above a ``FakeTensorMode``: gives the answers of the two tables, and keeps real tensors real."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation, or answer for it."""
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
        name = func._schema.name
        if tensors and func.namespace != "c10d" and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if name == "aten::_local_scalar_dense" and tensors[0].constant is None:  # type: ignore[attr-defined]
            return _read(tensors[0])
        if torch.Tag.data_dependent_output in func.tags and name != "aten::_local_scalar_dense":
            raise _unknown(f"{name}, whose result depends on data")
        if torch.Tag.dynamic_output_shape in func.tags and not (name == "aten::index" and _by_position(args[1])):
            return _sized(name, args)
        if name in _WITHOUT_FAKE:
            return FakeWork().boxed()
        return func(*args, **kwargs)


def _read(element: Tensor) -> float:
    frame = _caller()
    for read in READS:
        if read.is_at(frame):
            return read.answer(frame, element)
    raise _unknown("a value of the device")


def _by_position(indices: Sequence[Tensor | None]) -> bool:
    """Whether ``tensor[indices]`` has a size that does not depend on their values."""
    return all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in indices)


def _sized(name: str, args: Sequence[Any]) -> Tensor:
    frame = _caller()
    for size in SIZES:
        if size.operation == name and size.is_at(frame):
            return args[0].new_empty(size.count(frame))
    raise _unknown(f"{name}, whose size depends on data")


_BETWEEN = ("/torch/", "commands/plan/answers.py", "commands/plan/meter.py", "mcore/compat/torch_proxy.py")


def _caller() -> FrameType:
    """The innermost frame that is neither torch's nor of what stands between: who asks."""
    frame = sys._getframe(1)
    while any(part in frame.f_code.co_filename for part in _BETWEEN) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _unknown(what: str) -> PlanError:
    frame = _caller()
    place = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
    return PlanError(
        f"a rehearsal cannot go on: {place} reads {what}, and megatron_dppo/commands/plan/answers.py has no "
        "answer for this place"
    )
