"""Gated delta nets: flash-linear-attention's kernels and the rule in torch, each in bf16 against torch in float64."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.gpu.checks import Result, not_run
from tests.unit.interpret_delta_kernels import NAMES, packed_row, results

LENGTHS = [1500, 1, 3, 700, 64, 2048, 65]
"""Lengths of the packed sequences."""
HEADS = {"key_heads": 16, "heads": 32, "size": 128, "channels": 8192}
"""Sizes of Qwen3.5-35B-A3B."""
SMALL = {"key_heads": 2, "heads": 4, "size": 16, "channels": 96}
TIMES = 3.0
"""Bound on the kernel's bf16 error over that of torch in bf16."""


def check(device: torch.device) -> Iterator[Result]:
    """Output and gradients of each kernel, at the sizes of a published model."""
    from megatron_dppo.mcore.delta_rule import FLA, TORCH_KERNELS, find_miscompiling_triton, fla_kernels, has_fla
    from megatron_dppo.mcore.delta_versions import FIX

    on_cuda = device.type == "cuda"
    if not (on_cuda and has_fla()):
        yield not_run("flash-linear-attention's kernels against torch", f"CUDA and {FLA}")
        kernels, sizes, lengths = TORCH_KERNELS, SMALL, [70, 1, 3, 64]
    else:
        kernels, sizes, lengths = fla_kernels(), HEADS, LENGTHS
    row = packed_row(lengths, device)
    names = dict(NAMES)
    if kernels is not TORCH_KERNELS and (miscompiled := find_miscompiling_triton()):
        del names["mix"]
        yield not_run("mix: the gated delta rule", f"another Triton than {miscompiled} ({FIX})")
    for name, argument_names in names.items():
        parts = inputs(name, sum(lengths), device, **sizes)
        exact = results(TORCH_KERNELS, name, [x.double() for x in parts], row)
        errors = [
            [float((a - e).norm() / e.norm()) for a, e in zip(results(which, name, parts, row), exact, strict=True)]
            for which in (kernels, TORCH_KERNELS)
        ]
        for what, actual, plain in zip(argument_names, *errors, strict=True):
            yield Result(f"{name}: {what}, error times that of torch in bf16", actual / plain, TIMES)


def inputs(
    name: str, tokens: int, device: torch.device, key_heads: int, heads: int, size: int, channels: int
) -> list[torch.Tensor]:
    """Arguments of a kernel in bf16, the decay in fp32 as in the layer."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16().to(device)

    if name == "convolve":
        return [draw(tokens, channels + 64)[:, :channels], draw(channels, 4)]
    if name == "gate":
        return [draw(tokens, heads, size), draw(tokens, heads, size), draw(size)]
    keys = [draw(tokens, key_heads, size) for _ in range(2)]
    decay = -2 * draw(tokens, heads).float().sigmoid()
    return [*keys, draw(tokens, heads, size), decay, draw(tokens, heads).sigmoid()]
