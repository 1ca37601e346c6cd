"""Training samples from token sequences, and their packing. The shift by one happens here only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_dppo.types import (
    Completion,
    MicroBatch,
    Prompt,
    RolloutGroup,
    SamplingMask,
    TrainingSample,
    VersionSpan,
    version_spans,
)
from megatron_dppo.types.token_columns import TOKEN_COLUMNS, TokenColumn, TokenRows, carried_columns


def to_training_sample(
    prompt_ids: Sequence[int] | Tensor,
    response_ids: Sequence[int] | Tensor,
    rollout_logprobs: Sequence[float] | Tensor | None,
    advantage: float | Tensor,
    topk: tuple[Tensor, Tensor] | None = None,
    routed_experts: Tensor | None = None,
    sampled: Sequence[bool] | Tensor | None = None,
    sampling_mask: SamplingMask | None = None,
    columns: Mapping[str, TokenRows] | None = None,
) -> TrainingSample:
    """Align a prompt and its response to the labels.

    Position ``t`` predicts ``labels[t] = sequence[t + 1]``, so the response's first token sits at ``len(prompt) - 1``.
    A response token that was not sampled, or whose log mu is not finite, is outside of loss mask and denominators.

    Args:
        prompt_ids: At least one token.
        response_ids: R tokens, the end-of-sequence token included.
        rollout_logprobs: R natural log-probabilities; None for supervised samples.
        advantage: One value for the whole response, or one for each token, [R].
        topk: The rollout's Top-K ids and log-probabilities, ``[R, K+1]`` each (see ``Completion``).
        routed_experts: ``[P + R - 1, L, k]``, one row for each token of the sequence but the last.
        sampled: [R] False on tokens that were given to the policy, such as a tool's; None = it sampled all of them.
        sampling_mask: Ids that the rollout's filters allowed for each of R tokens. None: no filter.
        columns: Columns that a sample takes as they are (``TokenColumn.is_carried``), by name; the ones above may be
            given here too.

    Raises:
        ValueError: An empty prompt or response, or a column of another length.
    """
    if not len(prompt_ids) or not len(response_ids):
        raise ValueError(f"a sample needs tokens, got {len(prompt_ids)} prompt and {len(response_ids)} response tokens")
    for column, name in ((rollout_logprobs, "rollout log-probabilities"), (sampled, "entries of the loss mask")):
        if column is not None and len(column) != len(response_ids):
            raise ValueError(f"{len(column)} {name} for {len(response_ids)} response tokens")
    sequence = torch.cat([torch.as_tensor(ids, dtype=torch.int64) for ids in (prompt_ids, response_ids)])
    # The last token has no label, and the last prompt token predicts the first response token.
    length, first = sequence.numel() - 1, len(prompt_ids) - 1
    loss_mask = torch.zeros(length, dtype=torch.bool)
    loss_mask[first:] = True if sampled is None else torch.as_tensor(sampled)
    advantages = torch.zeros(length, dtype=torch.float32)
    advantages[first:] = advantage
    aligned = None
    if rollout_logprobs is not None:
        response_logprobs = torch.as_tensor(rollout_logprobs, dtype=torch.float32)
        # A token without a finite mu has no ratio, so it leaves the loss and the denominators.
        loss_mask[first:] &= response_logprobs.isfinite()
        aligned = torch.zeros(length, dtype=torch.float32)
        aligned[first:] = torch.where(loss_mask[first:], response_logprobs, 0.0)
    carried = _carried(columns or {}, topk, sampling_mask, routed_experts)
    _check_columns(carried, len(prompt_ids), len(response_ids))
    return TrainingSample(
        tokens=sequence[:-1],
        labels=sequence[1:],
        loss_mask=loss_mask,
        advantages=torch.where(loss_mask, advantages, 0.0),
        rollout_logprobs=aligned,
        **carried,
    )


def _check_columns(columns: Mapping[str, TokenRows], prompt_tokens: int, response_tokens: int) -> None:
    for column in TOKEN_COLUMNS:
        rows = columns.get(column.name) if column.is_carried and column.name is not None else None
        if rows is not None:
            column.check(rows, prompt_tokens, response_tokens)
    ids, logprobs = columns.get("rollout_topk_ids"), columns.get("rollout_topk_logprobs")
    if isinstance(ids, Tensor) and isinstance(logprobs, Tensor) and ids.shape != logprobs.shape:
        raise ValueError(
            f"Top-K ids {tuple(ids.shape)} and log-probabilities {tuple(logprobs.shape)}, expected two of one shape "
            f"[{response_tokens}, K+1], one row for each response token"
        )


def to_samples(
    groups: Sequence[RolloutGroup],
    advantages: Sequence[Sequence[float]],
    reward_scales: Sequence[Sequence[float]] | None = None,
) -> list[TrainingSample]:
    """Return one training sample for each segment of each rollout; other responses than agents' have one segment.

    All segments of a rollout have its advantage. If the reward failed, it is 0 and there is no gradient.

    ``reward_scales [groups][samples]`` are the derivatives of each advantage in its own reward with the group's
    statistics held fixed. Needed for credit by turn alone; None is 1 everywhere.
    """
    scales = reward_scales or [[1.0] * len(row) for row in advantages]
    return [
        _to_sample(group.prompt, segment, float(advantage), float(scale), index)
        for group, row, scale_row in zip(groups, advantages, scales, strict=True)
        for rollout, advantage, scale in zip(group.rollouts, row, scale_row, strict=True)
        for index, segment in enumerate(rollout.completion.segments)
    ]


def group_segments(samples: Sequence[TrainingSample]) -> list[list[int]]:
    """Return the sample indices of each episode, in order."""
    episodes: list[list[int]] = []
    for index, sample in enumerate(samples):
        if sample.segment == 0:
            episodes.append([])
        episodes[-1].append(index)
    return episodes


def episode_indices(samples: Sequence[TrainingSample]) -> list[int]:
    """Return the index of each sample's episode, which is that of its rollout in the groups of ``to_samples``."""
    return [number for number, indices in enumerate(group_segments(samples)) for _ in indices]


def with_episode_tokens(samples: Sequence[TrainingSample], *, equal_segments: bool) -> list[TrainingSample]:
    """Return the samples, with their final loss masks, with the fields that aggregate over episodes.

    ``equal_segments`` gives the segments of an episode with L tokens equal weights in sum: the tokens of each of its K
    segments, with n tokens in the loss, get the factor ``L / (K n)``. False weighs all tokens alike.
    """
    result = list(samples)
    for indices in group_segments(samples):
        if len(indices) == 1:
            continue
        counts = [samples[i].num_loss_tokens for i in indices]
        total = sum(counts)
        num_segments = sum(count > 0 for count in counts)
        for i, count in zip(indices, counts, strict=True):
            factor = total / (num_segments * count) if equal_segments and count else 1.0
            result[i] = replace(samples[i], episode_loss_tokens=total, segment_factor=factor)
    return result


def _to_sample(
    prompt: Prompt, completion: Completion, episode_advantage: float, reward_scale: float, segment: int
) -> TrainingSample:
    first = _given_first(completion) if prompt.is_task else 0
    advantage: float | Tensor = episode_advantage
    if completion.past_rewards is not None:
        # Return-to-go: a turn gets no credit for rewards that were given before it.
        advantage = episode_advantage - reward_scale * completion.past_rewards[first:]
    sample = to_training_sample(
        (*prompt.context_ids, *completion.token_ids[:first].tolist()),
        completion.token_ids[first:],
        None if completion.logprobs is None else completion.logprobs[first:],
        advantage,
        sampled=None if completion.loss_mask is None else completion.loss_mask[first:],
        columns=carried_columns(completion, first),
    )
    return replace(sample, sources=_sources(completion, sample.num_tokens), segment=segment)


def _sources(completion: Completion, num_labels: int) -> tuple[VersionSpan, ...]:
    """Return the completion's spans as positions of the labels: the last label is the last token."""
    length = len(completion.token_ids)
    spans = version_spans(completion.policy_versions, completion.policy_version, length)
    # Labels begin with those of the prompt: a response token is ``shift`` labels further on. Without a prompt that is
    # -1, and the first token is no label: a span may not begin before the labels, where a slice counts from their end.
    shift = num_labels - length
    return tuple(span._replace(start=max(span.start + shift, 0), end=span.end + shift) for span in spans)


def _given_first(completion: Completion) -> int:
    """Return the number of tokens before the first sampled one: an agent's prompt."""
    assert completion.loss_mask is not None, "an agent's sequence begins with what it asks"
    # ``argmax`` returns the first of equal values.
    return int(completion.loss_mask.int().argmax())


@dataclass(frozen=True, kw_only=True)
class RowShape:
    """Multiples to which a packed row and its sequences are padded."""

    row_multiple: int = 1
    """Multiple of the row's length: sequence parallelism splits rows over ranks."""
    sequence_multiple: int = 1
    """Multiple of each sequence's length: context parallelism splits every sequence over ranks."""

    def padded(self, tokens: int) -> int:
        """Return the padded length of a sequence of ``tokens``."""
        return -(-tokens // self.sequence_multiple) * self.sequence_multiple


def pack(
    samples: Sequence[TrainingSample],
    shape: RowShape | None = None,
    like: TrainingSample | None = None,
    *,
    joins_segments: bool = False,
) -> MicroBatch:
    """Put samples end to end in one row, every one padded to ``shape.sequence_multiple``.

    The row is padded to ``shape.row_multiple`` by one more sequence that is outside the loss. Padding at the end of a
    sequence is causal: nothing before it can see it. A rank that only runs the collectives of its peers has no samples;
    its row gets the optional fields of ``like``. With ``joins_segments`` the segments of an episode, all of them side
    by side, have one sequence id; the model still reads each by itself.
    """
    shape = shape or RowShape()
    like = samples[0] if samples else like
    if like is None:
        raise ValueError("an empty row needs a sample to be like: pass like=")
    lengths = [shape.padded(sample.num_tokens) for sample in samples]
    # An empty row is one sequence of padding, since the model needs a token.
    row_padding = -sum(lengths) % shape.row_multiple if samples else max(shape.row_multiple, shape.sequence_multiple)
    starts = [0, *accumulate(lengths)][: len(samples)]
    lengths += [row_padding] if row_padding else []
    size, ends = sum(lengths), torch.tensor([0, *accumulate(lengths)])
    repeats = torch.tensor(lengths)
    sequences = episode_indices(samples) if joins_segments else list(range(len(samples)))
    loss_tokens = [sample.sequence_loss_tokens for sample in samples]
    factors = [sample.segment_factor for sample in samples]
    if len(lengths) > len(samples):
        # The padding of the row is one more sequence, outside the loss.
        sequences.append(max(sequences, default=-1) + 1)
        loss_tokens.append(0)
        factors.append(1.0)
    sample_ends = [start + sample.num_tokens for sample, start in zip(samples, starts, strict=True)]
    is_padding = torch.ones(size, dtype=torch.bool)
    for start, end in zip(starts, sample_ends, strict=True):
        is_padding[start:end] = False
    return MicroBatch(
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        sequence_ids=torch.repeat_interleave(torch.tensor(sequences), repeats),
        sequence_loss_tokens=torch.repeat_interleave(torch.tensor(loss_tokens), repeats),
        segment_factors=torch.repeat_interleave(torch.tensor(factors, dtype=torch.float32), repeats),
        cu_seqlens=ends.to(torch.int32),
        max_seqlen=max(lengths),
        num_padding=int(is_padding.sum()),
        is_padding=is_padding,
        **_packed_columns(samples, like, sample_ends, size),
    )


def _carried(
    columns: Mapping[str, TokenRows],
    topk: tuple[Tensor, Tensor] | None,
    sampling_mask: SamplingMask | None,
    routed_experts: Tensor | None,
) -> dict[str, Any]:
    """Return the columns that a sample takes as they are, by name; those with an argument of their own win."""
    topk_ids, topk_logprobs = topk or (None, None)
    arguments: dict[str, TokenRows | None] = {
        "rollout_topk_ids": topk_ids,
        "rollout_topk_logprobs": topk_logprobs,
        "sampling_mask": sampling_mask,
        "routed_experts": routed_experts,
    }
    return {**columns, **{name: rows for name, rows in arguments.items() if rows is not None}}


def _packed_columns(
    samples: Sequence[TrainingSample], like: TrainingSample, sample_ends: Sequence[int], size: int
) -> dict[str, Any]:
    """Return the columns of a row of ``size`` tokens in which the samples end at ``sample_ends``."""
    columns: dict[str, Any] = {}
    for column in TOKEN_COLUMNS:
        if column.name is None or not column.is_packed:
            continue
        parts = [getattr(sample, column.name) for sample in samples]
        if column.is_optional:
            _check_alike(column, parts)
        if (first := getattr(like, column.name)) is not None:
            columns[column.name] = column.pack(parts, sample_ends, size, first)
    return columns


def _check_alike(column: TokenColumn, parts: Sequence[Any]) -> None:
    forms = {column.form(part) for part in parts}
    if len(forms) > 1:
        words = "with and without" if None in forms else "with different shapes or types of"
        raise ValueError(f"samples {words} {column.title} cannot share a micro-batch")


class HasTokens(Protocol):
    """Anything with a length, such as a ``TrainingSample``."""

    @property
    def num_tokens(self) -> int:
        """Number of input tokens."""
        ...


def fill_bins(samples: Sequence[HasTokens], budget: int, shape: RowShape | None = None) -> list[list[int]]:
    """Return the sample indices of each micro-batch: first-fit decreasing, at most ``budget`` tokens each.

    Longest first fills the budget best; a sample longer than the budget gets a micro-batch of its own. The same samples
    in the same order give the same split.
    """
    shape = shape or RowShape()
    lengths = [shape.padded(sample.num_tokens) for sample in samples]
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(samples)), key=lambda i: -lengths[i]):
        slot = next((i for i, left in enumerate(room) if lengths[index] <= left), None)
        if slot is None:
            bins.append([])
            room.append(budget)
            slot = len(bins) - 1
        bins[slot].append(index)
        room[slot] -= lengths[index]
    return bins


def split_evenly(bins: list[list[int]], count: int) -> list[list[int]]:
    """Halve the bin with the most samples (the first of equals) until there are ``count``; too few give empty bins."""
    if len(bins) > count:
        raise ValueError(f"{len(bins)} micro-batches are needed, more than count = {count}")
    bins = list(bins)
    while len(bins) < count and any(len(part) > 1 for part in bins):
        most = max(range(len(bins)), key=lambda i: len(bins[i]))
        part = bins[most]
        # Every other one: the bin is sorted by length, so the halves cost about the same.
        bins[most : most + 1] = [part[::2], part[1::2]]
    return bins + [[] for _ in range(count - len(bins))]
