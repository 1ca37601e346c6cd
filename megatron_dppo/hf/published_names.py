"""Names of a model within a folder that holds more: a vision model, layers for further tokens.

Released Qwen3.5 folders have the language model under ``model.language_model.``, the weights of all experts of a layer
in one tensor, a vision model and a layer for further tokens. The last two are not trained. An exported folder gets them
unchanged, so that servers find a complete model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

LANGUAGE_MODEL = "model.language_model."
"""Prefix of the language model's weights in such a folder. Elsewhere it is ``model.``"""
_CARRIED = ("mtp.", "model.visual.")
_FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")
_GATE_UP = ("gate_proj", "up_proj")


def is_carried(name: str) -> bool:
    """Return True for a weight that is not trained, and is copied to exported folders."""
    return name.startswith(_CARRIED)


def usual_name(name: str) -> str:
    """Return the name of a weight in a folder of the language model alone."""
    return "model." + name.removeprefix(LANGUAGE_MODEL) if name.startswith(LANGUAGE_MODEL) else name


def published_name(name: str) -> str:
    """Return the name of a language model's weight in a folder that holds more; the inverse of ``usual_name``."""
    return LANGUAGE_MODEL + name.removeprefix("model.") if name.startswith("model.") and not is_carried(name) else name


class StoredWeight(NamedTuple):
    """One weight, or one expert's part of a tensor of all experts, in an open safetensors file."""

    file: Any
    """Handle of ``safe_open``."""
    name: str
    """Name in the file."""
    expert: int | None = None
    """Expert of the part. None for the whole tensor."""
    half: int | None = None
    """0 for the gate and 1 for the up projection of an expert. None for all rows."""

    def read(self) -> Tensor:
        """Return the tensor; only its part is read."""
        if self.expert is None:
            tensor: Tensor = self.file.get_tensor(self.name)
            return tensor
        part: Tensor = self.file.get_slice(self.name)[self.expert]
        return (part if self.half is None else part.chunk(2, 0)[self.half]).contiguous()

    def describe(self) -> tuple[tuple[int, ...], str]:
        """Return the shape, and the dtype in safetensors' words, without reading the tensor."""
        header = self.file.get_slice(self.name)
        shape = tuple(header.get_shape())
        if self.expert is not None:
            shape = shape[1:]
        if self.half is not None:
            shape = (shape[0] // 2, *shape[1:])
        return shape, str(header.get_dtype())


def stored_weights(file: Any, name: str) -> Iterator[tuple[str, StoredWeight]]:
    """Yield the weights of one stored tensor by their usual names: itself, or one for each expert."""
    fused = _FUSED.fullmatch(name)
    if fused is None:
        yield usual_name(name), StoredWeight(file, name)
        return
    module = usual_name(fused[1])
    for expert in range(file.get_slice(name).get_shape()[0]):
        if fused[2] == "down_proj":
            yield f"{module}.{expert}.down_proj.weight", StoredWeight(file, name, expert)
            continue
        for half, projection in enumerate(_GATE_UP):
            yield f"{module}.{expert}.{projection}.weight", StoredWeight(file, name, expert, half)
