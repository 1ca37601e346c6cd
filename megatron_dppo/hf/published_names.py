"""Weights of a model in folders that name them otherwise, join experts, quantize them or hold more than the model.

Released Qwen3.5 folders have the language model under ``model.language_model.``, the weights of all experts of a layer
in one tensor, a vision model and a layer for further tokens. The last two are not trained. An exported folder gets them
unchanged, so that servers find a complete model. Released gpt-oss folders join experts too, in MXFP4.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_dppo.errors import CheckpointError
from megatron_dppo.hf.families.fused_experts import CHUNKED, INTERLEAVED, FusedExperts, match_fused
from megatron_dppo.hf.mxfp4 import BLOCK, check_blocks, dequantize

LANGUAGE_MODEL = "model.language_model."
"""Prefix of the language model's weights in such a folder. Elsewhere it is ``model.``"""
_CARRIED = ("mtp.", "model.visual.")
_BLOCKS, _SCALES = "_blocks", "_scales"
_QUANTIZED = re.compile(rf"(.*\.mlp\.experts\.(?:gate_up|down)_proj)({_BLOCKS}|{_SCALES})")


def is_carried(name: str) -> bool:
    """Return True for a weight that is not trained, and is copied to exported folders."""
    return name.startswith(_CARRIED)


def usual_name(name: str) -> str:
    """Return the name of a weight in a folder of the language model alone."""
    return "model." + name.removeprefix(LANGUAGE_MODEL) if name.startswith(LANGUAGE_MODEL) else name


def published_name(name: str) -> str:
    """Return the name of a language model's weight in a folder that holds more; the inverse of ``usual_name``."""
    return LANGUAGE_MODEL + name.removeprefix("model.") if name.startswith("model.") and not is_carried(name) else name


@dataclass(frozen=True)
class StoredWeight:
    """One weight in an open safetensors file."""

    file: safe_open
    name: str

    def read(self) -> Tensor:
        """Return the tensor."""
        tensor: Tensor = self.file.get_tensor(self.name)
        return tensor

    def describe(self) -> tuple[tuple[int, ...], str]:
        """Return the shape, and the dtype in safetensors' words, without reading the tensor."""
        return _header(self.file, self.name)


@dataclass(frozen=True)
class ExpertWeight(StoredWeight):
    """One expert's weight in a tensor of all experts."""

    expert: int
    kind: str
    """Projection of the tensor (``gate_up_proj``)."""
    local_name: str
    """Projection and kind of the weight (``up_proj.weight``)."""
    layout: FusedExperts

    def read(self) -> Tensor:
        """Return the weight; only the expert's part is read."""
        return self.layout.parts(self.kind, self.file.get_slice(self.name)[self.expert])[self.local_name].contiguous()

    def describe(self) -> tuple[tuple[int, ...], str]:
        """Return the shape and the dtype of the weight."""
        shape, dtype = _header(self.file, self.name)
        return tuple(self.layout.parts(self.kind, torch.empty(shape[1:], device="meta"))[self.local_name].shape), dtype


@dataclass(frozen=True)
class QuantizedExpertWeight(ExpertWeight):
    """One expert's weight in a tensor of all experts in MXFP4, whose rows are those of the weight."""

    scales_file: safe_open

    def read(self) -> Tensor:
        """Return the weight in bf16; only the expert's part is read."""
        rows = self.layout.rows(self.local_name)
        blocks = self.file.get_slice(self.name)[self.expert][rows]
        scales = self.scales_file.get_slice(_scales_name(self.name))[self.expert][rows]
        return dequantize(blocks, scales, self.name)

    def describe(self) -> tuple[tuple[int, ...], str]:
        """Return the shape and the dtype that ``read`` returns."""
        shape, _ = _header(self.file, self.name)
        rows = len(range(shape[1])[self.layout.rows(self.local_name)])
        return (rows, shape[2] * BLOCK), "BF16"


def _header(file: safe_open, name: str) -> tuple[tuple[int, ...], str]:
    header = file.get_slice(name)
    return tuple(header.get_shape()), str(header.get_dtype())


def _scales_name(name: str) -> str:
    return name.removesuffix(_BLOCKS) + _SCALES


def stored_weights(files: Mapping[str, safe_open], names: Iterable[str]) -> Iterator[tuple[str, StoredWeight]]:
    """Yield the weights of the stored tensors ``names`` by their usual names: itself, or one for each expert."""
    names = set(names)
    # Only gpt-oss joins biases of experts, and only its tensors are interleaved.
    is_interleaved = any(name.endswith(".mlp.experts.gate_up_proj_bias") for name in names)
    layout = INTERLEAVED if is_interleaved else CHUNKED
    for name in names:
        quantized = _QUANTIZED.fullmatch(name) if is_interleaved else None
        fused = match_fused(name if quantized is None else quantized[1])
        if fused is None:
            yield usual_name(name), StoredWeight(files[name], name)
        elif quantized is None or quantized[2] == _BLOCKS:
            yield from _expert_weights(files, name, *fused, layout, is_quantized=quantized is not None)
        elif name.removesuffix(_SCALES) + _BLOCKS not in names:
            raise CheckpointError(f"Expected {name.removesuffix(_SCALES) + _BLOCKS} beside {name}, got none.")


def _expert_weights(
    files: Mapping[str, safe_open], name: str, module: str, kind: str, layout: FusedExperts, *, is_quantized: bool
) -> Iterator[tuple[str, StoredWeight]]:
    header = _header(files[name], name)
    if is_quantized:
        scales = _scales_name(name)
        if scales not in files:
            raise CheckpointError(f"Expected {scales} beside {name}, got none. Copy the folder again.")
        check_blocks(header, _header(files[scales], scales), name)
    for expert in range(header[0][0]):
        for local_name in layout.names(kind):
            part = (files[name], name, expert, kind, local_name, layout)
            weight = QuantizedExpertWeight(*part, files[scales]) if is_quantized else ExpertWeight(*part)
            yield f"{usual_name(module)}.{expert}.{local_name}", weight
