"""Prompts, completions and rollouts: the records of engines and rewards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_dppo_engines.responses import FinishReason, ResponseColumns, SamplingMask, SamplingParams, VersionSpan


class DropReason(StrEnum):
    """Reasons why a group is not trained on. Each is a metric, ``rollout/dropped_groups/<reason>``."""

    NO_SIGNAL = "no_signal"
    """All its rewards are equal."""
    SURPLUS = "surplus"
    """The step had enough groups."""
    CANCELED = "canceled"
    """It was stopped while it was sampled, and is not resumed."""


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
    metadata: Mapping[str, object] = field(default_factory=dict)
    """The other columns of the data row."""
    source: str = ""
    messages: tuple[Mapping[str, object], ...] | None = None
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


class ToolTime(NamedTuple):
    """Time in which an agent ran the tools that a response called."""

    position: int
    """Index of the last token of that response."""
    seconds: float
    tools: tuple[str, ...]


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
    response is one sequence. See ``megatron_dppo_agents.segments``."""
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
        """Sequences of the response, each with a context of its own, in order; one sequence is its only segment."""
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
