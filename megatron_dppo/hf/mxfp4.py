"""Numbers of the OCP Microscaling format MXFP4 (OCP MX specification 1.0, sections 5.2 and 6), as bf16.

32 numbers of 4 bits (E2M1) share a scale of 8 bits (E8M0). gpt-oss stores two numbers in a byte, the first one in the
low bits.
"""

import math

import torch
from torch import Tensor

from megatron_dppo.errors import CheckpointError

BLOCK = 32
_BIAS = 127
_NAN = 255


def _e2m1(code: int) -> float:
    """Return the number of a sign, two bits of exponent with bias 1, and one bit of mantissa."""
    sign = code >> 3
    exponent = code >> 1 & 3
    mantissa = code & 1
    size = math.ldexp(1 + mantissa / 2, exponent - 1) if exponent else mantissa / 2
    return -size if sign else size


_E2M1 = torch.tensor([_e2m1(code) for code in range(16)])


def dequantize(blocks: Tensor, scales: Tensor, name: str) -> Tensor:
    """Return the numbers of blocks, ``[..., num_blocks * BLOCK]`` in bf16, which holds each of them exactly.

    ``blocks`` are uint8 ``[..., num_blocks, BLOCK / 2]``, ``scales`` uint8 ``[..., num_blocks]``.
    """
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    sizes = torch.ldexp(torch.ones(()), scales.int() - _BIAS)
    numbers = _E2M1[codes.int()] * sizes[..., None]
    if bool((scales == _NAN).any()) or not bool(numbers.isfinite().all()):
        raise CheckpointError(
            f"Expected finite numbers in MXFP4 in {name}, got NaN or a number above the largest one in bf16. Copy the "
            "folder again."
        )
    return numbers.flatten(-2).bfloat16()


def check_blocks(blocks: tuple[tuple[int, ...], str], scales: tuple[tuple[int, ...], str], name: str) -> None:
    """Check shapes and dtypes (in safetensors' words) of stored blocks and their scales."""
    (block_shape, block_dtype), (scale_shape, scale_dtype) = blocks, scales
    fits = block_shape[:-1] == scale_shape and block_shape[-1:] == (BLOCK // 2,)
    if not fits or (block_dtype, scale_dtype) != ("U8", "U8"):
        raise CheckpointError(
            f"Expected {name} in MXFP4: blocks [..., {BLOCK // 2}] and a scale for each in U8, got {block_shape} in "
            f"{block_dtype} and {scale_shape} in {scale_dtype}. Copy the folder again."
        )
