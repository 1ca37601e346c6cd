"""Digests of weights that trainer and server compute alike, also from parts that arrive one after the other.

There are two algorithms. ``sha256`` hashes the bytes in row-major order. ``words``, for GPUs, sums a position-dependent
hash of 32-bit words, so that parts may arrive in any order. It is the algorithm of SGLang's ``gpu_tensor_hash``
(0.5.19 to 0.5.23, sglang/kernels/ops/memory/gpu_tensor_hash.py). It detects faults, not forgeries.

On a GPU the words of a whole batch of tensors are hashed in one launch, and all results are read at once. This package
needs torch, numpy and Triton only, because it is also loaded inside vLLM.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from .batched_words import BatchedWords
from .parts import Cut, PartsDigest, WordsDigest, as_bytes

__all__ = [
    "BatchedWords",
    "Cut",
    "PartsDigest",
    "TensorDigests",
    "WordsDigest",
    "device_algorithm",
    "has_kernel",
    "tensor_digest",
]


def tensor_digest(tensor: Tensor) -> str:
    """Return ``sha256:...`` for a tensor on the CPU, ``words:...`` for one on another device."""
    digests = TensorDigests(device_algorithm(tensor.device))
    digests.add("", 0, tensor)
    return f"{digests.algorithm}:{digests.hexdigests()[''][0]}"


def device_algorithm(device: torch.device) -> str:
    """Return the algorithm for tensors on a device."""
    return "sha256" if device.type == "cpu" else "words"


def has_kernel(device: torch.device) -> bool:
    """Return True if words on this device are hashed by the kernel."""
    return device.type == "cuda"


class TensorDigests:
    """Digests of many tensors whose bytes arrive in parts, in any order."""

    def __init__(self, algorithm: str) -> None:
        self.algorithm = algorithm
        self._parts: dict[Hashable, list[PartsDigest]] = {}
        self._batched: BatchedWords | None = None

    def add(self, key: Hashable, start: int, tensor: Tensor, cut: Cut | None = None) -> None:
        """Add the parts of all ranks; all parts of a target together have no gap and no overlap.

        The part starts at byte ``start`` of its target. On a GPU the tensor must not change before ``flush``. Without a
        cut one rank has all.
        """
        data = as_bytes(tensor)
        if cut is None:
            cut = Cut(1, 1, data.numel(), data.numel(), 0)
        if self.algorithm == "words" and has_kernel(data.device):
            self._batched = self._batched or BatchedWords()
            self._batched.add(key, start, data, cut)
            return
        if key not in self._parts:
            self._parts[key] = [PartsDigest(self.algorithm) for _ in range(cut.ranks)]
        for rank, parts in enumerate(self._parts[key]):
            parts.add(start, cut.part(data, rank))

    def flush(self) -> None:
        """Finish all reads of the tensors, which may change afterwards."""
        if self._batched is not None:
            self._batched.flush()

    def hexdigests(self, keys: Iterable[Hashable] | None = None) -> dict[Hashable, list[str]]:
        """Return the hexadecimal digests of complete targets (None: all), one for each rank."""
        digests = {} if self._batched is None else self._batched.hexdigests()
        selected = [*self._parts, *digests] if keys is None else keys
        return {key: digests[key] if key in digests else [p.hexdigest() for p in self._parts[key]] for key in selected}
