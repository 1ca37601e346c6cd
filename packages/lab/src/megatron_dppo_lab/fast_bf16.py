"""Speed of bf16 on this machine."""

from __future__ import annotations

import time

import torch

_BF16_SPEEDUP = 1.3
"""Smallest speedup of bf16 products over fp32 ones at which training in bf16 is faster."""


def has_fast_bf16() -> bool:
    """Return True if bf16 products are faster than fp32 ones: always with CUDA, measured on a CPU."""
    if torch.cuda.is_available():
        return True
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        # The sizes of an MLP of SmolLM2-135M.
        left = torch.ones(512, 576, dtype=dtype)
        right = torch.ones(576, 1536, dtype=dtype)
        times = []
        for _ in range(5):
            began = time.perf_counter()
            torch.mm(left, right)
            # The fastest of five: other processes only ever make a product slower.
            times.append(time.perf_counter() - began)
        seconds[dtype] = min(times)
    return seconds[torch.float32] > _BF16_SPEEDUP * seconds[torch.bfloat16]
