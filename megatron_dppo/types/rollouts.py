"""Prompts, completions and rollouts: the records of engines and rewards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor


def as_bytes(column: Tensor) -> Tensor:
    """Return the bytes of the numbers in order, uint8 [num_bytes].

    The result shares the memory of a contiguous column. ``as_strided`` is needed because torch calls a tensor of one
    element contiguous whatever its stride is, and then cannot view it as another type.

    Example:
        >>> as_bytes(torch.tensor([[1, 2], [3, 4]], dtype=torch.int16)[:, 1]).tolist()
        [2, 0, 4, 0]
    """
    return column.detach().contiguous().as_strided((column.numel(),), (1,)).view(torch.uint8)


@dataclass(frozen=True, eq=False)
class SamplingMask:
    """Sampling masks of T tokens: the ids that the sampling filters (top-p, top-k, min-p) allowed at each position.

    A token was sampled from the softmax over its allowed ids alone, and is one of them. The sets have 1 to thousands of
    ids, so they are stored one after the other: a padded rectangle would be mostly empty. Indexing selects tokens, as
    in a tensor.

    Not to be confused with the loss mask (tokens that are trained) and the keep mask (tokens whose update the trust
    region keeps).

    Example: Three tokens. The second one was not sampled (a tool wrote it), so it has no mask.

        >>> mask = SamplingMask(torch.tensor([7, 2, 5], dtype=torch.int32), torch.tensor([2, 0, 1], dtype=torch.int32))
        >>> len(mask), mask[1:].ids.tolist(), mask[torch.tensor([2, 0])].ids.tolist()
        (3, [5], [5, 7, 2])
    """

    ids: Tensor
    """Allowed ids of the first token, then those of the second, and so on. Int32, shape [N]. Distinct within a
    token."""
    counts: Tensor
    """Number of allowed ids of each token. Int32 on the CPU, shape [T]. 0 means no filter: the whole vocabulary."""

    @classmethod
    def none(cls, length: int) -> SamplingMask:
        """Return ``length`` tokens without a mask."""
        return cls(torch.empty(0, dtype=torch.int32), torch.zeros(length, dtype=torch.int32))

    @classmethod
    def cat(cls, parts: Sequence[SamplingMask]) -> SamplingMask:
        """Return the tokens of all parts, one after the other."""
        return cls(torch.cat([part.ids for part in parts]), torch.cat([part.counts for part in parts]))

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, rows: Tensor | slice) -> SamplingMask:
        """Return the tokens at ``rows``: a slice without step, or an int64 or bool tensor on the CPU."""
        counts = self.counts
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(len(counts))
            # The counts are on the CPU, so finding the ids of the first token does not wait for the device.
            first = int(counts[:start].sum())
            return SamplingMask(self.ids[first : first + int(counts[start:stop].sum())], counts[start:stop])
        rows = rows.cpu()
        chosen = counts[rows]
        starts = counts.cumsum(0)[rows] - chosen
        # Where a row starts in the result, and so by how much its entries shift.
        new_starts = chosen.cumsum(0) - chosen
        indices = torch.arange(int(chosen.sum())) + (starts - new_starts).repeat_interleave(chosen)
        return SamplingMask(self.ids[indices.to(self.ids.device, non_blocking=True)], chosen)

    def to(self, device: torch.device) -> SamplingMask:
        """Return the same mask with its ids on ``device``; the counts stay on the CPU."""
        return SamplingMask(self.ids.to(device, non_blocking=True), self.counts)


def check_sampling_mask(sampling_mask: SamplingMask, rows: int) -> None:
    """Check that ids and counts fit each other and the number of tokens ``rows``.

    Raises:
        ValueError: If shapes or types are wrong, a count is negative, or the counts do not add up to the ids.
    """
    ids, counts = sampling_mask.ids, sampling_mask.counts
    if ids.dim() != 1 or ids.dtype != torch.int32 or counts.shape != (rows,) or counts.dtype != torch.int32:
        raise ValueError(
            f"sampling masks of int32 ids [N] and counts [{rows}] are expected, one a token, got {ids.dtype} "
            f"{list(ids.shape)} and {counts.dtype} {list(counts.shape)}"
        )
    if (counts < 0).any() or int(counts.sum()) != len(ids):
        raise ValueError(
            f"the counts of the sampling masks are {int(counts.min())} at least and {int(counts.sum())} in all, "
            f"expected 0 or more, and the {len(ids)} ids that there are"
        )


class FinishReason(StrEnum):
    """Reasons why an engine stopped sampling. Each is a metric, ``rollout/finish/<reason>``."""

    STOP = "stop"
    """An end token, which is the last token of the response."""
    LENGTH = "length"
    """The limit of new tokens."""
    ABORT = "abort"
    """The request was aborted. A ``Completion`` never has it: an aborted response is resumed or given up."""


class DropReason(StrEnum):
    """Reasons why a group is not trained on. Each is a metric, ``rollout/dropped_groups/<reason>``."""

    NO_SIGNAL = "no_signal"
    """All its rewards are equal."""
    SURPLUS = "surplus"
    """The step had enough groups."""
    CANCELED = "canceled"
    """It was stopped while it was sampled, and is not resumed."""


class VersionSpan(NamedTuple):
    """Tokens ``[start, end)``, all sampled by one server with the weights of ``policy_version``."""

    policy_version: int
    start: int
    end: int
    server: str = ""
    """URL of the server. Empty for an engine in this process."""


def version_spans(spans: Iterable[VersionSpan], policy_version: int, num_tokens: int) -> tuple[VersionSpan, ...]:
    """Return the spans of a response of ``num_tokens``. Without spans, all were sampled with ``policy_version``."""
    return tuple(spans) or (VersionSpan(policy_version, 0, num_tokens),)


def token_ages(spans: Iterable[VersionSpan], num_tokens: int, policy_version: int) -> Tensor:
    """Return the age of each token: optimizer updates between the weights that sampled it and the policy.

    Args:
        spans: Weights that sampled the tokens. A token in no span gets age 0.
        num_tokens: Number of tokens.
        policy_version: Version of the policy.

    Returns:
        Float32, shape [num_tokens].
    """
    ages = torch.zeros(num_tokens)
    for span in spans:
        ages[max(span.start, 0) : span.end] = policy_version - span.policy_version
    return ages


@dataclass(frozen=True, kw_only=True)
class PromptLimits:
    """Limits of one source of prompts. None uses the limit of the run."""

    source: str
    """Name of the source in ``[data.sources]``."""
    max_new_tokens: int | None = None
    max_calls: int | None = None
    max_segments: int | None = None
    timeout_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One problem, ready for an engine."""

    prompt_id: str
    """Stable identity, for example ``train.jsonl:12`` (file and line)."""
    text: str
    """The prompt as the model sees it (chat template applied)."""
    token_ids: tuple[int, ...]
    label: str
    """The reference answer for the reward function."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the data row."""
    source: str = ""
    """Name of the source, as in ``[data.sources]``."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    """The row's chat messages. None if the row has a plain string."""
    is_task: bool = False
    """True if an agent builds the sequence itself; ``token_ids`` then only shows how the row would look."""
    limits: PromptLimits | None = None
    """Limits of the row's source. None: all limits are those of the run."""

    @property
    def context_ids(self) -> tuple[int, ...]:
        """Token ids that every response continues; empty for an agent's task."""
        return () if self.is_task else self.token_ids

    def limit_key(self, key: str) -> str:
        """Return the key of the limit in effect: ``key`` of the run, such as ``agent.max_calls``, or the source's."""
        name = key.rpartition(".")[2]
        limits = self.limits
        return key if limits is None or getattr(limits, name) is None else f'data.sources."{limits.source}".{name}'

    def limited(self, params: SamplingParams) -> SamplingParams:
        """Return the sampling parameters with the response limit of the prompt's source."""
        limit = None if self.limits is None else self.limits.max_new_tokens
        return params if limit is None else replace(params, max_new_tokens=min(limit, params.max_new_tokens))


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request.

    ``temperature`` 0 means greedy. ``top_p`` 1, ``top_k`` 0 and ``min_p`` 0 disable the filters, which work on the
    distribution at the temperature.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    """Smallest allowed probability, as a share of the largest one."""
    seed: int = 0
    # Columns that the engine returns besides the tokens and their log-probabilities.
    topk_logprobs: int = 0
    """K: also return the K most probable tokens of every position. 0 disables it."""
    routed_experts: bool = False
    """Also return the experts that the routers chose."""
    router_weights: bool = False
    """Also return the combine weights of the chosen experts."""
    return_sampling_mask: bool = False
    """Also return the ids that the filters allowed at each token."""
    columns: tuple[str, ...] = ()
    """Further columns of the response to return, those with ``TokenColumn.is_on_request``."""

    def __post_init__(self) -> None:
        # JSON between processes has lists.
        object.__setattr__(self, "columns", tuple(self.columns))

    @property
    def has_filters(self) -> bool:
        """True if a filter excludes some ids."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, kw_only=True, eq=False)
class ResponseColumns:
    """Columns of a response that engines return on request. R response tokens.

    ``types.token_columns`` declares them, and the columns that every response has.
    """

    topk_token_ids: Tensor | None = None
    """Top-K ids. Int32, shape [R, K+1]. Slots 0 to K-1 hold the most probable tokens by rank. Slot K holds the sampled
    token if it is not one of them, else -1. -1 marks an unused slot everywhere."""
    topk_logprobs: Tensor | None = None
    """Log-probabilities of these ids. Float32, shape [R, K+1]. -inf is valid: a filter excludes the id."""
    sampling_mask: SamplingMask | None = None
    """Sampling masks of R tokens. ``logprobs`` and the Top-K are then of the softmax over the allowed ids. Tokens that
    were not sampled have no mask. None if not requested."""
    routed_experts: Tensor | None = None
    """Experts that the engine's routers chose for each token of prompt and response but the last, in each of the
    model's L layers. Uint8 or int16, shape [P + R - 1, L, k] with k experts per token; see ``MISSING_EXPERT``. With
    ``SamplingParams.router_weights`` the last dimension is ``RoutingShape.width``."""


class ToolTime(NamedTuple):
    """Time in which an agent ran the tools that a response called."""

    position: int
    """Index of the last token of that response."""
    seconds: float
    tools: tuple[str, ...]
    """Names of the tools."""


class SegmentCredit(NamedTuple):
    """Reward that a segment of an episode of several agents is credited with."""

    agent: str
    """Name of the agent. Its rewards are compared with those of the same agent in the group's other episodes."""
    run: int
    """Number of the agent's run in the episode. Segments of one run have one reward."""
    reward: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion(ResponseColumns):
    """Response of an engine to one prompt. R response tokens, the end-of-sequence token included."""

    token_ids: Tensor
    """Response tokens. Int32, shape [R]."""
    logprobs: Tensor | None
    """Log-probability of each token under the policy that sampled it, at the sampling temperature: the anchor log mu.
    Float32, shape [R]."""
    finish_reason: FinishReason
    """Reason why sampling stopped."""
    policy_version: int
    """Version of the weights that sampled the tokens; the newest one if there were several."""
    text: str
    """Decoded response without special tokens."""
    policy_versions: tuple[VersionSpan, ...] = ()
    """Weights version and server of each sampled token. Empty means that all tokens have ``policy_version``. Tokens
    that were not sampled are in no span."""
    loss_mask: Tensor | None = None
    """True on sampled tokens, False on tokens that a tool or a user wrote. Bool, shape [R]. None means that all were
    sampled. A token that was not sampled has ``logprobs`` 0.0 and only unused Top-K slots, both without meaning."""
    # The fields below are set by agents and ``rollout.generate`` only.
    reward: float | None = None
    """Reward from ``rollout.generate`` or an agent. None: the reward function computes it."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Parts of ``reward``, if the agent gives them by name."""
    failure: str = ""
    """Reason why an agent failed, else empty. A failed sample carries no training signal."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Counters of the episode. The mean of each is a metric, ``rollout/NAME``."""
    segment_lengths: tuple[int, ...] = ()
    """Tokens of each segment of an agent's episode, in the order in which they began; they add up to R. Empty: the
    response is one sequence. See ``types.segments``."""
    segment_texts: tuple[str, ...] = ()
    """Decoded text of each segment from its first response on."""
    tool_times: tuple[ToolTime, ...] = ()
    """Times of the tools that the responses of an agent's episode called."""
    past_rewards: Tensor | None = None
    """Sum of the rewards of the episode's turns before the one that sampled the token, for credit by turn. Float32,
    shape [R]. None: every token gets the credit of the episode."""

    segment_credits: tuple[SegmentCredit, ...] = ()
    """Credit of each segment, one for a response of one sequence, for credit by agent. Empty: all have that of the
    episode."""

    @property
    def segments(self) -> tuple[Completion, ...]:
        """Sequences of the response, each with a context of its own, in the order in which they began.

        A response that is one sequence is its only segment.
        """
        if not self.segment_lengths:
            return (self,)
        ends = list(accumulate(self.segment_lengths))
        texts = self.segment_texts or ("",) * len(ends)
        return tuple(self._cut(*bounds, text) for bounds, text in zip(pairwise([0, *ends]), texts, strict=True))

    def _cut(self, start: int, end: int, text: str) -> Completion:
        """Return the segment of the tokens from ``start`` to ``end``."""
        columns: dict[str, Any] = {}
        for name, rows in vars(self).items():
            # The model does not read the last token of a segment: there is no route of it.
            last = end - 1 if name == "routed_experts" else end
            if isinstance(rows, Tensor):
                # A view would take the rows of all segments along to other processes.
                columns[name] = rows[start:last].clone()
            elif isinstance(rows, SamplingMask):
                columns[name] = rows[start:last]
        spans = tuple(
            span._replace(start=max(span.start, start) - start, end=min(span.end, end) - start)
            for span in self.policy_versions
            if span.start < end and span.end > start
        )
        times = tuple(
            each._replace(position=each.position - start) for each in self.tool_times if start <= each.position < end
        )
        return replace(
            self,
            text=text,
            policy_versions=spans,
            segment_lengths=(),
            segment_texts=(),
            segment_credits=(),
            tool_times=times,
            **columns,
        )


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """A completion with its reward."""

    prompt: Prompt
    completion: Completion
    reward: float
    """Reward that training uses: the score with its shaping."""
    reward_failed: bool = False
    """True if the reward function raised or timed out. Such a sample carries no training signal."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """``score`` (without shaping) and the named parts. Empty if the reward is one unshaped number."""
    eval_score: float | None = None
    """Score of the function that ``reward.functions`` marks with ``eval``, even if another function failed. None if no
    function is marked."""

    @property
    def score(self) -> float:
        """Score that accuracy is computed from: ``eval_score``, else the reward without shaping."""
        return self.reward_parts.get("score", self.reward) if self.eval_score is None else self.eval_score


@dataclass(frozen=True, kw_only=True)
class GreedyResponse:
    """Score of the greedy response to a prompt, which is not trained on."""

    reward: float
    reward_failed: bool
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class RolloutGroup:
    """Rollouts of one prompt: the unit over which group-relative advantages are computed."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    greedy: GreedyResponse | None = None
    """Baseline of ReMax. None with other advantages, and until a step takes the group."""
