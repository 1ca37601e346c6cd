"""Training samples to packed micro-batches (Megatron's THD layout)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_dppo.types import MicroBatch, TrainingSample


def pack(samples: Sequence[TrainingSample], multiple: int = 1) -> MicroBatch:
    """Put samples end to end in one row.

    The row is padded to a multiple of ``multiple`` by one more sequence that is outside the loss. No samples at all
    give a row of padding, which a rank without work still has to run for the collectives of its peers.

    Raises:
        ValueError: only some samples have rollout log-probabilities; neither dropping nor inventing them is right.
    """
    if len({s.rollout_logprobs is None for s in samples}) > 1:
        raise ValueError("samples with and without rollout log-probabilities cannot share a micro-batch")
    padding = -sum(s.num_tokens for s in samples) % multiple if samples else multiple
    with_logprobs = bool(samples) and samples[0].rollout_logprobs is not None
    rows = [*samples, _padding_sample(padding, with_logprobs)] if padding else list(samples)
    lengths = torch.tensor([s.num_tokens for s in rows])
    ends = lengths.cumsum(0)
    return MicroBatch(
        tokens=torch.cat([s.tokens for s in rows]),
        labels=torch.cat([s.labels for s in rows]),
        loss_mask=torch.cat([s.loss_mask for s in rows]),
        advantages=torch.cat([s.advantages for s in rows]),
        rollout_logprobs=_stack_logprobs(rows) if with_logprobs or not samples else None,
        position_ids=torch.cat([torch.arange(int(n)) for n in lengths]),
        sequence_ids=torch.repeat_interleave(torch.arange(len(rows)), lengths),
        cu_seqlens=torch.cat([ends.new_zeros(1), ends]).to(torch.int32),
        max_seqlen=int(lengths.max()),
    )


def _padding_sample(length: int, with_logprobs: bool) -> TrainingSample:
    return TrainingSample(
        tokens=torch.zeros(length, dtype=torch.int64),
        labels=torch.zeros(length, dtype=torch.int64),
        loss_mask=torch.zeros(length, dtype=torch.bool),
        advantages=torch.zeros(length),
        rollout_logprobs=torch.zeros(length) if with_logprobs else None,
    )


def _stack_logprobs(rows: Sequence[TrainingSample]) -> torch.Tensor:
    parts = [torch.zeros(s.num_tokens) if s.rollout_logprobs is None else s.rollout_logprobs for s in rows]
    return torch.cat(parts)


def split_by_tokens(samples: Sequence[TrainingSample], budget: int) -> list[list[TrainingSample]]:
    """Greedy split in order, at most ``budget`` tokens each; a longer sample gets a micro-batch of its own."""
    parts: list[list[TrainingSample]] = []
    used = budget + 1
    for sample in samples:
        if used + sample.num_tokens > budget or not parts:
            parts.append([])
            used = 0
        parts[-1].append(sample)
        used += sample.num_tokens
    return parts


def micro_batches(samples: Sequence[TrainingSample], budget: int, count: int, multiple: int = 1) -> list[MicroBatch]:
    """Exactly ``count`` packed micro-batches; every rank of a step needs the same number.

    Args:
        samples: this rank's share.
        budget: tokens of one micro-batch.
        count: the largest number that any data-parallel rank needs. A rank that needs fewer splits further, as far as
            it has samples, and fills the rest with rows of padding.
        multiple: see ``pack``.

    Raises:
        ValueError: ``count`` is smaller than what the budget needs.
    """
    parts = split_by_tokens(samples, budget)
    if len(parts) > count:
        raise ValueError(f"{len(parts)} micro-batches of {budget} tokens are needed, more than count = {count}")
    parts = _split_further(parts, min(count, len(samples)))
    return [pack(part, multiple) for part in [*parts, *([[]] * (count - len(parts)))]]


def _split_further(parts: list[list[TrainingSample]], count: int) -> list[list[TrainingSample]]:
    """Halve the part with the most samples (the first of equals) until there are ``count``; the order is kept."""
    parts = list(parts)
    while len(parts) < count:
        most = max(range(len(parts)), key=lambda i: len(parts[i]))
        middle = (len(parts[most]) + 1) // 2
        parts[most : most + 1] = [parts[most][:middle], parts[most][middle:]]
    return parts
