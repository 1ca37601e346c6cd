"""flash-linear-attention's real kernels against the rule in torch, on the CPU in Triton's interpreter.

``TRITON_INTERPRET=1 python -m tests.unit.interpret_delta_kernels FOLDER`` prints a JSON object a case: its name, and
the error of each value relative to float64, in fp32 and fp16 (the interpreter multiplies no bf16). FOLDER holds the
unpacked wheel of fla-core. Two lines of this copy are changed: the interpreter's loops count in Python's integers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LENGTHS = [[70, 1, 3, 64, 20], [65], [2, 2]]
NAMES = {
    "convolve": ("output", "x", "weight"),
    "mix": ("output", "query", "key", "value", "decay", "beta"),
    "gate": ("output", "x", "gates", "weight"),
}


def import_fla(folder: Path) -> None:
    """Put the copy on the path, without the autotuner, which measures on a GPU."""
    from triton.runtime.autotuner import Autotuner

    state = folder / "fla/ops/common/chunk_delta_h.py"
    text, loop = state.read_text(), "i_t_int64 = i_t.to(tl.int64)"
    assert text.count(loop) == 2, "the loops of fla's kernels differ from those of fla-core 0.6.0"
    state.write_text(text.replace(loop, "i_t_int64 = i_t"))
    start = Autotuner.__init__

    def first_config(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        self.configs = self.configs[:1]

    Autotuner.__init__ = first_config
    sys.path.insert(0, str(folder))


def packed_row(lengths: Sequence[int], device: torch.device | None = None) -> Any:
    from megatron_dppo_megatron_cpu.attention import PackedRow

    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    positions = torch.cat([torch.arange(end - start) for start, end in pairwise(starts)])
    cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=device)
    return PackedRow(qkv_format="thd", cu_seqlens_q=cu_seqlens, starts=tuple(starts), positions=positions.to(device))


def inputs(name: str, tokens: int) -> list[Tensor]:
    """Arguments in float64: 2 key heads of 16, 4 value heads of 32, 24 channels."""
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if name == "convolve":
        # A view of wider rows, as the layer's.
        return [draw(tokens, 40)[:, :24], draw(24, 4)]
    if name == "gate":
        return [draw(tokens, 4, 32), draw(tokens, 4, 32), draw(32)]
    scales = draw(2, tokens, 4).sigmoid()
    return [draw(tokens, 2, 16), draw(tokens, 2, 16), draw(tokens, 4, 32), -2 * scales[0], scales[1]]


def results(kernels: Any, name: str, parts: Sequence[Tensor], row: Any) -> list[Tensor]:
    """Output and gradients of all arguments."""
    parts = [part.detach().requires_grad_() for part in parts]
    run: Callable[..., Tensor] = getattr(kernels, name)
    output = run(*parts, 1e-3 if name == "gate" else row)
    weight = torch.arange(output.numel(), dtype=torch.float64).view(output.shape).sin().to(output)
    return [output.detach(), *torch.autograd.grad((output * weight).sum(), parts)]


def main() -> None:
    import_fla(Path(sys.argv[1]))
    from megatron_dppo.mcore.delta_rule import TORCH_KERNELS, fla_kernels

    kernels = fla_kernels()
    for dtype in (torch.float32, torch.float16):
        for lengths in LENGTHS:
            row = packed_row(lengths)
            for name in NAMES:
                exact = inputs(name, sum(lengths))
                # As in the layer, the decay is fp32 in any case.
                parts = [x.to(torch.float32 if name == "mix" and i == 3 else dtype) for i, x in enumerate(exact)]
                exact = [x.double() for x in parts]
                expected = results(TORCH_KERNELS, name, exact, row)
                line: dict[str, Any] = {"name": f"{name} {lengths} {dtype}"}
                for which, wanted in (("fla", kernels), ("torch", TORCH_KERNELS)):
                    actual = results(wanted, name, parts, row)
                    shapes = [(x.shape, x.dtype) for x in actual]
                    assert shapes == [(x.shape, p.dtype) for x, p in zip(expected, [parts[-1], *parts], strict=True)]
                    errors = [float((a - e).norm() / e.norm()) for a, e in zip(actual, expected, strict=True)]
                    line[which] = dict(zip(NAMES[name], errors, strict=True))
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
