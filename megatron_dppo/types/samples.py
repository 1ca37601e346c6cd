"""What training reads: columns of tokens, aligned to the labels (see the docstring of the package)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, overload

import torch
from torch import Tensor

from megatron_dppo.types.rollouts import SamplingMask


@dataclass(frozen=True, kw_only=True)
class TokenFields:
    """What training needs of each token besides the policy itself, aligned to the labels (see the module docstring)."""

    labels: Tensor
    """[T] int64"""
    loss_mask: Tensor
    """[T] bool, True on response tokens that train"""
    advantages: Tensor
    """[T] float32"""
    rollout_logprobs: Tensor | None = None
    """[T] float32, 0 where loss_mask is False"""
    rollout_topk_ids: Tensor | None = None
    """[T, K+1] int32, -1 = unused slot (see Completion)"""
    rollout_topk_logprobs: Tensor | None = None
    """[T, K+1] float32"""
    sampling_mask: SamplingMask | None = None
    """of T tokens: what the rollout's filters left. Every log-probability here is of the softmax over it. None = no
    filter"""
    recomputed_logprobs: Tensor | None = None
    """[T] float32, recomputed by the trainer at the start of the step"""
    reference_logprobs: Tensor | None = None
    """[T] float32, under the reference policy"""


@dataclass(frozen=True, kw_only=True)
class TrainingSample(TokenFields):
    """One sequence.

    Example: prompt ``[5, 6]``, response ``[7, 2]`` gives ``tokens [5, 6, 7]``, ``labels [6, 7, 2]``,
    ``loss_mask [False, True, True]``.
    """

    tokens: Tensor
    """[T] int64, input ids"""
    number: int = -1
    """its place in the step, over all data-parallel ranks; -1 = nobody asked"""
    rollout_topk_ids: Tensor | None = None
    """[R, K+1] int32, those of the last R positions; the slots of the others, which have no part in the loss, are
    unused"""
    rollout_topk_logprobs: Tensor | None = None
    """[R, K+1] float32, as the ids"""
    sampling_mask: SamplingMask | None = None
    """of the last R positions, as the Top-K"""
    teacher_logprobs: Tensor | None = None
    """[T] float32, under the teacher; only until they are part of the advantages"""
    routed_experts: Tensor | None = None
    """[T, L, k] uint8 or int16, the experts that are replayed: row t belongs to the input token t; with their combine
    weights ``RoutingShape.width`` instead of k"""

    @property
    def num_tokens(self) -> int:
        """Length T."""
        return int(self.tokens.numel())


@dataclass(frozen=True, kw_only=True)
class TokenTargets(TokenFields):
    """What a loss needs of each token of a row, or of some tokens of it.

    Example: token 7 was sampled after a prompt of two tokens.

        >>> targets = TokenTargets(
        ...     labels=torch.tensor([6, 7]),
        ...     loss_mask=torch.tensor([False, True]),
        ...     advantages=torch.tensor([0.0, 0.5]),
        ...     rollout_logprobs=torch.tensor([0.0, -0.7]),
        ... )
        >>> targets.select(targets.loss_mask).labels
        tensor([7])
    """

    sequence_ids: Tensor | None = None
    """[T] int64, index of the sequence inside the row"""
    token_weights: Tensor | None = None
    """[T] float32, the aggregation as per-token weights; None = 1 everywhere"""

    def select(self, rows: Tensor | slice, on_host: Tensor | None = None) -> TokenTargets:
        """The tokens at ``rows``, in that order.

        ``on_host`` are the same on the CPU: with them sampling masks are picked without waiting for a device.
        """
        chosen: dict[str, Any] = {}
        for name in (f.name for f in fields(TokenTargets)):
            column = getattr(self, name)
            at = on_host if isinstance(column, SamplingMask) and on_host is not None else rows
            chosen[name] = None if column is None else column[at]
        return TokenTargets(**chosen)


@dataclass(frozen=True, kw_only=True)
class MicroBatch(TokenTargets):
    """Several sequences packed end to end into one row of T tokens (Megatron's THD layout)."""

    tokens: Tensor
    """[T] int64"""
    routed_experts: Tensor | None = None
    """[T, L, k] uint8 or int16, as those of the samples, missing on padding"""
    num_padding: int = 0
    """how many of the T positions are padding"""
    position_ids: Tensor
    """[T] int64, starting from 0 in each sequence"""
    sequence_ids: Tensor
    """[T] int64, index of the sequence inside this micro-batch"""
    cu_seqlens: Tensor
    """[number of sequences + 1] int32, where each sequence starts; the last entry is T"""
    max_seqlen: int

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch with every tensor on ``device``."""
        columns: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                columns[name] = value.to(device, non_blocking=True)
            elif isinstance(value, SamplingMask):
                columns[name] = value.to(device)
        return replace(self, **columns)


class MicroBatches(Sequence[MicroBatch]):
    """Micro-batches that are made when they are asked for, so that a step's tokens are in memory once, not twice.

    Args:
        count: how many there are.
        make: the one of an index, always the same. The last one is kept.
    """

    def __init__(self, count: int, make: Callable[[int], MicroBatch]) -> None:
        self._count, self._make = count, make
        self._last: tuple[int, MicroBatch] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...

    @overload
    def __getitem__(self, index: slice) -> MicroBatches: ...

    def __getitem__(self, index: int | slice) -> MicroBatch | MicroBatches:
        chosen = range(self._count)[index]
        if isinstance(chosen, range):
            return MicroBatches(len(chosen), lambda i: self[chosen[i]])
        if self._last is None or self._last[0] != chosen:
            self._last = (chosen, self._make(chosen))
        return self._last[1]

    def map(self, change: Callable[[MicroBatch], MicroBatch]) -> MicroBatches:
        """Each of them changed."""
        return MicroBatches(self._count, lambda i: change(self[i]))
