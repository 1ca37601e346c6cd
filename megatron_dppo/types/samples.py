"""Training samples and micro-batches: columns of tokens, aligned to the labels (see the docstring of the package)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, overload

import torch
from torch import Tensor

from megatron_dppo_engines.responses import SamplingMask, VersionSpan


@dataclass(frozen=True, kw_only=True)
class TokenFields:
    """Columns that training needs for each token, aligned to the labels (see the docstring of the package)."""

    labels: Tensor
    """Token to predict. Int64, shape [T]."""
    loss_mask: Tensor
    """The loss mask: True on response tokens that are trained. Bool, shape [T]."""
    advantages: Tensor
    """Advantages. Float32, shape [T]."""
    rollout_logprobs: Tensor | None = None
    """Log mu, the anchor. Float32, shape [T]. 0 outside the loss mask."""
    rollout_topk_ids: Tensor | None = None
    """Top-K ids. Int32, shape [T, K+1]. -1 is an unused slot (see ``Completion``)."""
    rollout_topk_logprobs: Tensor | None = None
    """Log mu at these ids. Float32, shape [T, K+1]."""
    sampling_mask: SamplingMask | None = None
    """Ids that the rollout's filters allowed at T tokens. All log-probabilities here are of the softmax over them.
    None: no filter."""
    recomputed_logprobs: Tensor | None = None
    """Log pi', recomputed by the trainer at the start of the step. Float32, shape [T]."""
    reference_logprobs: Tensor | None = None
    """Log-probabilities under the reference policy. Float32, shape [T]."""
    ages: Tensor | None = None
    """Age of each token: optimizer updates between the weights that sampled it and the policy. Float32, shape [T]."""


@dataclass(frozen=True, kw_only=True)
class TrainingSample(TokenFields):
    """One sequence.

    Example: Prompt ``[5, 6]``, response ``[7, 2]`` gives ``tokens [5, 6, 7]``, ``labels [6, 7, 2]``,
    ``loss_mask [False, True, True]``.
    """

    tokens: Tensor
    """Input ids. Int64, shape [T]."""
    number: int = -1
    """Index of its episode in the step, over all data-parallel ranks. -1 means not assigned."""
    segment: int = 0
    """Index among the segments of its episode. They stand side by side, so an episode begins with each 0."""
    episode_loss_tokens: int | None = None
    """Tokens inside the loss mask of all segments of the episode. None: those of the sample alone."""
    segment_factor: float = 1.0
    """Factor of the aggregation weights of its tokens, by ``agent.segment_weight``."""
    sources: tuple[VersionSpan, ...] = ()
    """Weights version and server of each sampled label, as spans of the T positions. Empty if unknown."""
    # Declared again: in a sample these columns have a row for each of its R response tokens only.
    rollout_topk_ids: Tensor | None = None
    """Top-K ids of the last R positions. Int32, shape [R, K+1]. The other positions are outside the loss mask and have
    only unused slots."""
    rollout_topk_logprobs: Tensor | None = None
    """Log mu at these ids. Float32, shape [R, K+1]."""
    sampling_mask: SamplingMask | None = None
    """Sampling masks of the last R positions, like the Top-K."""
    teacher_logprobs: Tensor | None = None
    """Log-probabilities under the teacher, until they are added to the advantages. Float32, shape [T]."""
    routed_experts: Tensor | None = None
    """Experts that are replayed; row t belongs to input token t. Uint8 or int16, shape [T, L, k]. With combine weights
    the last dimension is ``RoutingShape.width``."""

    @property
    def num_tokens(self) -> int:
        """Length T."""
        return int(self.tokens.numel())

    @property
    def num_loss_tokens(self) -> int:
        """Tokens inside the loss mask."""
        return int(self.loss_mask.sum())

    @property
    def sequence_loss_tokens(self) -> int:
        """Tokens inside the loss mask of the sequence that losses see: the episode."""
        return self.num_loss_tokens if self.episode_loss_tokens is None else self.episode_loss_tokens

    def without_loss(self) -> TrainingSample:
        """Return the sample with an empty loss mask: it keeps its place in the batch and trains nothing."""
        return replace(self, loss_mask=torch.zeros_like(self.loss_mask))


@dataclass(frozen=True, kw_only=True)
class TokenTargets(TokenFields):
    """Columns that a loss needs for the tokens of a row, or for some of them.

    Example: Token 7 was sampled after a prompt of two tokens.

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
    """Index of the sequence in the row. Int64, shape [T]."""
    token_weights: Tensor | None = None
    """Aggregation as per-token weights. Float32, shape [T]. None means 1 everywhere."""

    def select(self, rows: Tensor | slice, on_host: Tensor | None = None) -> TokenTargets:
        """Return the tokens at ``rows``, in that order.

        Args:
            rows: Indices of tokens, or a slice.
            on_host: The same indices on the CPU. With them sampling masks are selected without a synchronization.
        """
        chosen: dict[str, Any] = {}
        for name in (f.name for f in fields(TokenTargets)):
            column = getattr(self, name)
            # A sampling mask keeps its counts on the CPU: indices on the device would have to be copied back first.
            indices = on_host if isinstance(column, SamplingMask) and on_host is not None else rows
            chosen[name] = None if column is None else column[indices]
        return TokenTargets(**chosen)


@dataclass(frozen=True, kw_only=True)
class MicroBatch(TokenTargets):
    """Several sequences packed end to end into one row of T tokens (Megatron's THD layout)."""

    tokens: Tensor
    """Input ids. Int64, shape [T]."""
    routed_experts: Tensor | None = None
    """Experts that are replayed, as in the samples; missing on padding. Uint8 or int16, shape [T, L, k]."""
    num_padding: int = 0
    """Number of padding positions."""
    is_padding: Tensor | None = None
    """Mask of padding positions. Bool, shape [T]. None means no padding."""
    # Layout of the row: Megatron's packed-sequence parameters are made from the fields below.
    position_ids: Tensor
    """Position in the sequence, from 0. Int64, shape [T]."""
    sequence_ids: Tensor
    """Index of the sequence in this micro-batch. Int64, shape [T]. Segments of one episode that are packed next to each
    other on purpose have one index: losses see the episode as a sequence."""
    sequence_loss_tokens: Tensor
    """``TrainingSample.sequence_loss_tokens`` of the token's sample. Int64, shape [T]."""
    segment_factors: Tensor
    """``TrainingSample.segment_factor`` of the token's sample. Float32, shape [T]."""
    cu_seqlens: Tensor
    """Start of each sequence; the last entry is T. Int32, shape [num_sequences + 1]."""
    max_seqlen: int
    """Length of the longest sequence."""

    def to(self, device: torch.device) -> MicroBatch:
        """Return the same micro-batch with every tensor on ``device``."""
        columns: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                columns[name] = value.to(device, non_blocking=True)
            elif isinstance(value, SamplingMask):
                columns[name] = value.to(device)
        return replace(self, **columns)


class MicroBatches(Sequence[MicroBatch]):
    """Micro-batches that are packed on access, so that the tokens of a step are in memory once, not twice.

    Args:
        count: Number of micro-batches.
        make: Return the micro-batch of an index, always the same. The last one is cached.
    """

    def __init__(self, count: int, make: Callable[[int], MicroBatch]) -> None:
        self._count = count
        self._make = make
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
        # Packing is repeatable, so a micro-batch that is read again later may be packed again; only the last one is
        # kept.
        if self._last is None or self._last[0] != chosen:
            self._last = (chosen, self._make(chosen))
        return self._last[1]

    def map(self, change: Callable[[MicroBatch], MicroBatch]) -> MicroBatches:
        """Return micro-batches that ``change`` is applied to on access."""
        return MicroBatches(self._count, lambda i: change(self[i]))
