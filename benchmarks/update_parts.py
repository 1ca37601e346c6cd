"""Parts of an update and of a start that were made cheaper, each against the way it was done before.

    python benchmarks/update_parts.py [--rounds 5] [--json FILE]

One process, one core, CPU seconds, the two ways in turn; prints the median of the ratios and its range.

- attention: sequences in groups of similar length, against all of a row padded to its longest one. Forward and backward
  of one layer, response lengths log-normal (sigma 1), all equal in the last case.
- Adam: torch's fused kernels against the same update as a list of elementary operations (foreach).
- gradient norm: computed once a step, against a second time inside Megatron's step.
- weights: each tensor of a folder from files that stay open, against a file that is opened for each.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_dppo.hf.weight_files import FolderWeights
from megatron_dppo.mcore.shims import apply_shims
from megatron_dppo.parallel.platform import Platform

warnings.simplefilter("ignore")
apply_shims(Platform.detect())

from megatron_dppo_megatron_cpu import attention as length_buckets  # noqa: E402
from megatron_dppo_megatron_cpu.attention import PackedRow, SDPACoreAttention  # noqa: E402
from megatron_dppo_megatron_cpu.fused_adam import FusedAdam  # noqa: E402

Way = Callable[[], Any]


def lognormal_lengths(tokens: int, longest: int, seed: int) -> list[int]:
    """Lengths that fill a row of ``tokens``."""
    draw, lengths = random.Random(seed), list[int]()
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, longest, 8 + int(draw.lognormvariate(5.0, 1.0))))
    return lengths


def attention(lengths: list[int], most_padded: float) -> Way:
    """Forward and backward of one layer: 8 heads, 2 groups of keys, 64 wide."""
    starts = [0, *accumulate(lengths)]
    fields = {"attention_dropout": 0.0, "window_size": None, "window_attn_skip_freq": None, "softmax_type": "vanilla"}
    module = SDPACoreAttention(SimpleNamespace(**fields), 1, None, "self")
    parts = [torch.randn(starts[-1], heads, 64, requires_grad=True) for heads in (8, 2, 2)]
    positions = torch.cat([torch.arange(n) for n in lengths])
    cu_seqlens = torch.tensor(starts, dtype=torch.int32)
    batch: Any = SimpleNamespace(cu_seqlens=cu_seqlens, max_seqlen=max(lengths), position_ids=positions)

    def run() -> None:
        usual, length_buckets.MAX_PADDING_RATIO = length_buckets.MAX_PADDING_RATIO, most_padded
        try:
            row = PackedRow.from_batch(batch, starts)
            torch.autograd.grad(module(*parts, None, packed_seq_params=row).sum(), parts)
        finally:
            length_buckets.MAX_PADDING_RATIO = usual

    return run


def adam(*, fused: bool) -> Way:
    """One update of 20 million parameters in 60 tensors."""
    params = [torch.nn.Parameter(torch.randn(330_000)) for _ in range(60)]
    for param in params:
        param.grad = torch.randn_like(param)
    if fused:
        return FusedAdam(params, lr=1e-3, weight_decay=0.1).step
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1, foreach=True).step


def norms(times: int) -> Way:
    """Return a run that computes the norm of 20 million gradients."""
    grads = [torch.randn(330_000) for _ in range(60)]
    return lambda: [float(torch.stack([g.norm() for g in grads]).norm()) for _ in range(times)]


def weights(folder: Path, *, stay_open: bool) -> Way:
    """Return a run that reads all tensors of a folder by name."""

    def reopened() -> None:
        for name in names:
            with safe_open(folder / "model.safetensors", framework="pt") as handle:
                handle.get_tensor(name)

    source = FolderWeights(folder)
    names = sorted(source.names())
    return (lambda: [source[name] for name in names]) if stay_open else reopened


def paired(ours: Way, before: Way, rounds: int) -> list[float]:
    """Return sorted ratios of CPU seconds of the two ways, after one uncounted round."""
    ratios = []
    for number in range(rounds + 1):
        seconds = []
        for way in (ours, before):
            begin = time.process_time()
            way()
            seconds.append(time.process_time() - begin)
        if number:
            ratios.append(seconds[0] / seconds[1])
    return sorted(ratios)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        save_file({f"layers.{i}.weight": torch.zeros(64) for i in range(2000)}, Path(temporary) / "model.safetensors")
        skewed, equal = lognormal_lengths(8192, 4096, 0), [256] * 32
        cases: dict[str, tuple[Way, Way]] = {
            f"attention, {len(skewed)} lengths of {min(skewed)} to {max(skewed)}": (
                attention(skewed, 1.25),
                attention(skewed, 1e9),
            ),
            "attention, 32 lengths of 256": (attention(equal, 1.25), attention(equal, 1e9)),
            "Adam, fused / foreach": (adam(fused=True), adam(fused=False)),
            "gradient norm, once / twice": (norms(1), norms(2)),
            "2,000 weights, open files / opened for each": (
                weights(Path(temporary), stay_open=True),
                weights(Path(temporary), stay_open=False),
            ),
        }
        measured = {name: paired(*ways, options.rounds) for name, ways in cases.items()}
    print("CPU seconds, ours over the way before (1 = no change)")
    for name, ratios in measured.items():
        print(f"  {name:<48}{statistics.median(ratios):6.2f}   ({ratios[0]:.2f} .. {ratios[-1]:.2f})")
    if options.json:
        options.json.write_text(json.dumps(measured, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
