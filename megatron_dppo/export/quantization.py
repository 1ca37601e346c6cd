"""Quantized weights in the forms that servers load: FP8 in blocks, and INT4 of the routed experts.

Both depend on the weights alone: every scale is the largest magnitude of its block or group, divided by the largest
number of the type. There is no calibration, so new weights cost one pass over them.

- ``fp8``: E4M3 in blocks of 128 x 128 of each linear layer, the ``fp8`` format of DeepSeek-V3 and of Qwen's own FP8
  folders: ``X.weight`` in float8 and ``X.weight_scale_inv`` in fp32, one factor per block.
- ``int4``: the routed experts alone in groups of 32 inputs, symmetric, the ``pack-quantized`` format of
  compressed-tensors in which Kimi-K2 is published: ``X.weight_packed`` (8 numbers in an int32), ``X.weight_scale`` and
  ``X.weight_shape``.

>>> dict(quantize_stream([("model.layers.0.mlp.up_proj.weight", torch.ones(128, 256))], Quantization("fp8"))).keys()
dict_keys(['model.layers.0.mlp.up_proj.weight', 'model.layers.0.mlp.up_proj.weight_scale_inv'])
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from megatron_dppo.errors import CheckpointError
from megatron_dppo.hf.folder import Weights, WeightStream

Format = Literal["fp8", "int4"]
FORMATS: tuple[Format, ...] = get_args(Format)
BLOCK = 128
GROUP = 32
_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max
_LARGEST_INT4 = 7
_PACKED = 8

# w1, w2 and w3 are the experts of Mixtral.
_LINEAR = re.compile(r".*\.layers\.\d+\..*(_proj(_with_mqa|_qkvz?|_z)?|\.w[123])\.weight")
_ROUTED_EXPERT = re.compile(r".*\.experts\.\d+\.((gate|up|down)_proj|w[123])\.weight")
_UNROUNDED = (
    *("lm_head", "embed_tokens", "mlp.gate", "block_sparse_moe.gate", "shared_expert_gate"),
    *("in_proj_ba", "in_proj_b", "in_proj_a", "conv1d"),
)
"""Modules that neither format quantizes: output layer, embedding, routers, the gate of a shared expert, and beta, alpha
and convolution of linear attention."""
_NOT_EXPERTS = [
    "lm_head",
    "re:.*self_attn.*",
    "re:.*linear_attn.*",
    "re:.*shared_expert.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
]
"""Ignored modules: Kimi-K2's list; the last entry is for layers without experts."""
_SUFFIX: dict[Format, str] = {"fp8": "_scale_inv", "int4": "_packed"}


@dataclass(frozen=True)
class Quantization:
    """Format of quantized weights, and the weights that have it.

    ``names`` are Hugging Face names. None: the format's usual weights, which are all linear layers of the decoder for
    ``fp8`` and the routed experts for ``int4``.
    """

    format: Format
    names: frozenset[str] | None = None

    def includes(self, name: str) -> bool:
        """Return True if a weight is quantized."""
        if self.names is not None:
            return name in self.names
        return (_LINEAR if self.format == "fp8" else _ROUTED_EXPERT).fullmatch(name) is not None

    def config(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the ``quantization_config`` of config.json, from the names of all weights of the model."""
        if self.format == "int4":
            return _int4_config()
        modules = {name.removesuffix(".weight") for name in names if name.endswith(".weight")}
        routers = sorted(module for module in modules if module.endswith(_UNROUNDED[2:]))
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ["lm_head", *routers],
        }


def quantize_stream(weights: WeightStream, quantization: Quantization) -> Weights:
    """Stream weights ``[out, in]`` as a quantized folder holds them; other weights pass unchanged."""
    quantize = _quantize_fp8 if quantization.format == "fp8" else _quantize_int4
    for name, tensor in weights:
        if quantization.includes(name):
            yield from quantize(name, tensor.detach())
        else:
            yield name, tensor


def find_quantized_names(names: Iterable[str], form: Format) -> frozenset[str]:
    """Return the weights that are quantized in a folder with tensors of these ``names``, by unquantized name."""
    suffix = f".weight{_SUFFIX[form]}"
    return frozenset(name.removesuffix(_SUFFIX[form]) for name in names if name.endswith(suffix))


def is_never_quantized(name: str) -> bool:
    """Return True for matrices that no server quantizes. Vectors are never quantized either."""
    return any(f"{module}.weight" in name for module in _UNROUNDED)


def is_quantized(tensor: Tensor) -> bool:
    """Return True if only quantized weights have the tensor's dtype, which must not be cast to the model's dtype."""
    return not tensor.is_floating_point() or tensor.dtype.itemsize == 1


def fp8_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a matrix ``[out, in]`` of any size to FP8 with one scale per block; the last blocks may be smaller.

    Returns float8_e4m3fn numbers, and fp32 scales ``[ceil(out / 128), ceil(in / 128)]``: number times scale is the
    weight within half a step. A block of zeros has the scale 1.
    """
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scale = blocks.abs().amax((1, 3)) / _LARGEST_FP8
    # The scale of tiny weights underflows to 0, which cannot divide.
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    # With a subnormal scale the quotient can exceed the range of FP8, which would make it NaN.
    numbers = (blocks / scale[:, None, :, None]).clamp(-_LARGEST_FP8, _LARGEST_FP8)
    return numbers.to(torch.float8_e4m3fn).reshape(padded.shape)[:rows, :columns].contiguous(), scale


def int4_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a matrix ``[out, in]`` with ``in`` a multiple of 32 to INT4 with one scale per group.

    Returns int8 numbers from -7 to 7, and scales ``[out, in / 32]`` in the dtype of ``weight``: number times scale is
    the weight within half a step. A group of zeros has the scale 1.
    """
    groups = weight.float().unflatten(1, (-1, GROUP))
    # Round with the scale as it is stored, not with the exact one.
    scale = (groups.abs().amax(-1) / _LARGEST_INT4).to(weight.dtype)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    numbers = (groups / scale.float()[..., None]).round().clamp(-_LARGEST_INT4, _LARGEST_INT4)
    return numbers.to(torch.int8).flatten(1), scale


def _quantize_fp8(name: str, weight: Tensor) -> Weights:
    _check(name, weight)
    numbers, scale = fp8_blocks(weight)
    yield name, numbers
    yield f"{name}_scale_inv", scale


def _quantize_int4(name: str, weight: Tensor) -> Weights:
    _check(name, weight)
    if weight.shape[1] % GROUP:
        raise CheckpointError(
            f"{name} has {weight.shape[1]} columns, but INT4 has one scale for {GROUP} of them: expected a multiple of "
            f"{GROUP}. Fix: use fp8"
        )
    numbers, scale = int4_groups(weight)
    shifts = torch.arange(0, 32, 32 // _PACKED, device=weight.device)
    # An offset of 8 makes unsigned 4-bit numbers; the first number has the lowest bits.
    packed = ((numbers.long() + 8).unflatten(1, (-1, _PACKED)) << shifts).sum(-1)
    # Reinterpret 32 unsigned bits as int32, whose highest bit is the sign.
    packed = torch.where(packed >= 2**31, packed - 2**32, packed)
    yield f"{name}_packed", packed.to(torch.int32)
    yield f"{name}_scale", scale
    yield f"{name}_shape", torch.tensor(weight.shape, dtype=torch.int64)


def _check(name: str, weight: Tensor) -> None:
    if weight.dim() != 2:
        raise CheckpointError(f"{name} has the shape {tuple(weight.shape)}; only matrices can be quantized")
    if not bool(torch.isfinite(weight).all()):
        raise CheckpointError(
            f"{name} has values that are not finite, so no scale exists. Fix: export the weights of a checkpoint "
            "that is finite"
        )


def _int4_config() -> dict[str, Any]:
    weights: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": GROUP,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "group",
        "symmetric": True,
        "type": "int",
    }
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": _NOT_EXPERTS,
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }
