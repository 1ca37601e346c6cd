"""Time ratios of bf16 and fp32 on this CPU, of one run: products, attention, the head's logits.

    python benchmarks/cpu_bf16.py [--rounds 9]

Sizes are those of SmolLM2-135M on packed rows of 2,048 tokens, on one thread. Each ratio is the median
over the rounds, which take the methods in turns; below 1 the second method is faster.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dppo.head.mixed_gemm import _allow_bf16_products, _blocks, logits_into  # reaches: timed alone

TOKENS = 2048
HIDDEN = 576
FFN = 1536
HEADS = 9
GROUPS = 3
HEAD_DIM = 64
VOCAB = 49152
LENGTHS = (64, 128, 256, 512, 2048)
CHUNK = 120
"""Rows of the head at a time at this vocabulary."""


def seconds(call: Callable[[], object]) -> float:
    """Return the wall seconds of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def ratio(rounds: int, first: Callable[[], object], second: Callable[[], object]) -> str:
    """Return the median of ``second / first`` with its range."""
    first()
    second()
    ratios = []
    for _ in range(rounds):
        base = seconds(first)
        ratios.append(seconds(second) / base)
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"


def product(dtype: torch.dtype) -> Callable[[], Tensor]:
    """Return the first product of an MLP."""
    x = torch.randn(TOKENS, HIDDEN).to(dtype)
    weight = torch.randn(2 * FFN, HIDDEN).to(dtype)
    return lambda: x @ weight.t()


def attention(length: int, dtype: torch.dtype) -> Callable[[], None]:
    """Return causal attention, forward and backward, of bf16 sequences computed in ``dtype``."""
    shapes = [(TOKENS // length, length, heads, HEAD_DIM) for heads in (HEADS, GROUPS, GROUPS)]
    leaves = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]

    def run() -> None:
        query, key, value = (leaf.to(dtype).transpose(1, 2) for leaf in leaves)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        out.bfloat16().sum().backward()

    return run


def logits_with_fresh_blocks(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    """Convert each block of the weight into newly allocated memory."""
    rows = hidden.float()
    with _allow_bf16_products(hidden.dtype):
        for block in _blocks(weight):
            torch.mm(rows, weight[block].float().t(), out=out[:, block])


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    print(f"product, bf16 over fp32: {ratio(rounds, product(torch.float32), product(torch.bfloat16))}")
    for length in LENGTHS:
        pair = attention(length, torch.bfloat16), attention(length, torch.float32)
        print(f"attention of {length:5} tokens, computed in fp32 over bf16: {ratio(rounds, *pair)}")
    hidden, weight = torch.randn(CHUNK, HIDDEN).bfloat16(), torch.randn(VOCAB, HIDDEN).bfloat16()
    out = torch.empty(CHUNK, VOCAB)
    fresh = ratio(
        rounds,
        lambda: logits_with_fresh_blocks(hidden, weight, out),
        lambda: logits_into(hidden, weight, None, out),
    )
    print(f"logits of {CHUNK} rows, one buffer over fresh blocks: {fresh}")


if __name__ == "__main__":
    main()
