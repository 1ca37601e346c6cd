"""Only what changed of some weights: the form in which it travels, and how an SGLang server takes it.

    PYTHONPATH=megatron_dppo/serving/sglang_extension ... --custom-weight-loader megatron_dppo_delta.load

A patch says of one tensor which elements are new, and which bytes they have: new values, not differences, so that a
patch may come twice. The server keeps fusions of our tensors, cut by tensor parallelism, that only its own weight
loaders know. So a patch becomes a full tensor in which every element that did not change is NaN, the server's loaders
load that one, and in all that they copy into the model a NaN leaves what is there. A value that is NaN
itself can therefore not be in a patch. This file imports only torch: it is loaded inside SGLang too. 0.5.19 to 0.5.23.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_HEAD, _GAPS, _VALUES = "megatron_dppo.patches", "megatron_dppo.gaps", "megatron_dppo.values"
_FARTHEST = 1 << 16
"""Elements between two of a patch: a gap is 16 bits, so that every so many an element comes that may not be new."""
_GAP_BYTES = 2
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Patch(NamedTuple):
    """What is new of one tensor."""

    name: str
    shape: tuple[int, ...]
    gaps: Tensor
    """[n] int16, the bits of a uint16: elements left out before each one, in row-major order"""
    values: Tensor
    """[n] in the type of the tensor"""


def patch_of(name: str, old: Tensor, new: Tensor) -> Patch | None:
    """What makes ``new`` of ``old``, by the bytes of each element; None = it takes no fewer bytes than the tensor, or a
    new value is NaN. Without elements where nothing changed.

    Args:
        name: of both.
        old: on the CPU, contiguous.
        new: of the same type and shape.
    """
    if old.dtype != new.dtype or old.shape != new.shape or not new.is_floating_point():
        return None
    bits = _BITS[new.element_size()]
    values = new.reshape(-1)
    differs = old.reshape(-1).view(bits) != values.view(bits)
    if differs.any():
        differs[::_FARTHEST] = True
        if int(differs.count_nonzero()) * (_GAP_BYTES + new.element_size()) >= new.nbytes:
            return None
    places = differs.nonzero().squeeze(1)
    values = values[places]
    if values.isnan().any():
        return None
    gaps = places.diff(prepend=places.new_full((1,), -1)) - 1
    return Patch(name, tuple(new.shape), gaps.to(torch.int16), values)


def packed(patches: Sequence[Patch]) -> list[tuple[str, Tensor]]:
    """All patches as three named tensors, whatever their number."""
    head = [[p.name, str(p.values.dtype).removeprefix("torch."), p.shape, len(p.gaps)] for p in patches]
    return [
        (_HEAD, torch.frombuffer(bytearray(json.dumps(head).encode()), dtype=torch.uint8)),
        (_GAPS, torch.cat([p.gaps for p in patches])),
        (_VALUES, torch.cat([p.values.view(torch.uint8) for p in patches])),
    ]


def unpacked(head: Tensor, gaps: Tensor, values: Tensor) -> Iterator[Patch]:
    """What was packed, on the device that it is on."""
    for name, dtype, shape, count in json.loads(bytes(head.tolist())):
        kind = getattr(torch, dtype)
        size = count * kind.itemsize
        # A copy: the part may not start where its type may.
        yield Patch(name, tuple(shape), gaps[:count], values[:size].clone().view(kind))
        gaps, values = gaps[count:], values[size:]


def places_of(patch: Patch) -> Tensor:
    """[n] int64 index of each element of the patch."""
    return ((patch.gaps.long() & (_FARTHEST - 1)) + 1).cumsum(0) - 1


def marked(patch: Patch) -> Tensor:
    """The whole tensor, NaN where nothing changed."""
    tensor = patch.values.new_full(patch.shape, torch.nan)
    tensor.view(-1)[places_of(patch)] = patch.values
    return tensor


class KeepMarked(TorchDispatchMode):
    """While it is active, NaN that is copied into a parameter or buffer of the model leaves what is there."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._storages = {w.untyped_storage().data_ptr() for w in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].untyped_storage().data_ptr() in self._storages:
            target, source = args[0], args[1].to(args[0])
            args = (target, torch.where(source.isnan(), target, source), *args[2:])
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def load(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Patches, and tensors that came whole, into a model of SGLang: its custom weight loader."""
    whole = dict(named_tensors)
    parts = [whole.pop(name) for name in (_HEAD, _GAPS, _VALUES) if name in whole]
    if whole:
        model.load_weights(list(whole.items()))  # type: ignore[operator]
    if parts:
        with KeepMarked(model):
            model.load_weights((patch.name, marked(patch)) for patch in unpacked(*parts))  # type: ignore[operator]
