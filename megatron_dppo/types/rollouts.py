"""What engines and rewards make of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor


def as_bytes(column: Tensor) -> Tensor:
    """uint8 ``[nbytes]`` of the numbers in order; the same memory where they lie together, which ``column`` keeps.

    Torch calls a tensor of one element contiguous whatever its stride is, and then cannot view it as another type.

    Example:
        >>> as_bytes(torch.tensor([[1, 2], [3, 4]], dtype=torch.int16)[:, 1]).tolist()
        [2, 0, 4, 0]
    """
    return column.detach().contiguous().as_strided((column.numel(),), (1,)).view(torch.uint8)


@dataclass(frozen=True, eq=False)
class SamplingMask:
    """T sets of ids, end to end; they have 1 to thousands of ids each, so that a rectangle would be mostly empty.

    A token was sampled from the softmax over its set alone, and is in it. Indexing picks rows, as of a tensor.

    Example: three tokens; the second one was given, so it has no set.

        >>> mask = SamplingMask(torch.tensor([7, 2, 5], dtype=torch.int32), torch.tensor([2, 0, 1], dtype=torch.int32))
        >>> len(mask), mask[1:].ids.tolist(), mask[torch.tensor([2, 0])].ids.tolist()
        (3, [5], [5, 7, 2])
    """

    ids: Tensor
    """[N] int32, those of the first token, then those of the second, and so on; distinct within a set"""
    counts: Tensor
    """[T] int32, always on the CPU: how many of them each token has; 0 = no set, the whole vocabulary"""

    @classmethod
    def none(cls, length: int) -> SamplingMask:
        """``length`` tokens without a set."""
        return cls(torch.empty(0, dtype=torch.int32), torch.zeros(length, dtype=torch.int32))

    @classmethod
    def cat(cls, parts: Sequence[SamplingMask]) -> SamplingMask:
        """The tokens of all parts, one after the other."""
        return cls(torch.cat([part.ids for part in parts]), torch.cat([part.counts for part in parts]))

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, rows: Tensor | slice) -> SamplingMask:
        """The tokens at ``rows``: a slice without step, or int64 or bool on the CPU (others are waited for)."""
        counts = self.counts
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(len(counts))
            first = int(counts[:start].sum())
            return SamplingMask(self.ids[first : first + int(counts[start:stop].sum())], counts[start:stop])
        rows = rows.cpu()
        starts, chosen = counts.cumsum(0)[rows] - counts[rows], counts[rows]
        # Entry i of the result is entry i - (what came before its row there) of its row here.
        places = torch.arange(int(chosen.sum())) + (starts - chosen.cumsum(0) + chosen).repeat_interleave(chosen)
        return SamplingMask(self.ids[places.to(self.ids.device, non_blocking=True)], chosen)

    def to(self, device: torch.device) -> SamplingMask:
        """The same with its ids on ``device``."""
        return SamplingMask(self.ids.to(device, non_blocking=True), self.counts)


def check_sampling_mask(sampling_mask: SamplingMask, rows: int) -> None:
    """The columns fit together and ``rows``.

    Raises:
        ValueError: another number of rows, a negative count, counts that do not add up to the ids, or another type.
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
    """Why an engine sampled no further; each is a metric, ``rollout/finish/<reason>``."""

    STOP = "stop"
    """an end token, which is the last of the response"""
    LENGTH = "length"
    """the limit"""
    ABORT = "abort"
    """It was told to. Never of a ``Completion``: what was stopped goes on, or is given up."""


class LeftOut(StrEnum):
    """Why a group of the stream is not trained on; each is a metric, ``rollout/left_out/<reason>``."""

    NO_SIGNAL = "no_signal"
    """all its rewards are equal"""
    SURPLUS = "surplus"
    """the step had enough"""
    GIVEN_UP = "given_up"
    """it was stopped while it was sampled, and is not carried on"""


class VersionSpan(NamedTuple):
    """Response tokens ``[start, end)`` were sampled with the weights of ``policy_version``."""

    policy_version: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One problem, ready for an engine."""

    prompt_id: str
    """Stable identity, for example ``train.jsonl:12`` (file and line)."""
    text: str
    """The prompt as the model sees it (chat template applied)."""
    token_ids: tuple[int, ...]
    label: str
    """The reference answer that the reward function gets."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the data row."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    """The row's chat messages; None when the row has a plain string."""
    is_task: bool = False
    """An agent writes the whole sequence itself, and ``token_ids`` is only how the row would look."""

    @property
    def start(self) -> tuple[int, ...]:
        """What every response goes on from."""
        return () if self.is_task else self.token_ids


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How an engine samples. ``temperature`` 0 means greedy; ``top_p`` 1, ``top_k`` 0 and ``min_p`` 0 mean no filter.

    Filters work on the distribution at the temperature.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    """keeps what has at least this share of the largest probability"""
    seed: int = 0
    topk_logprobs: int = 0
    """K: also report the K most probable tokens of every position; 0 = none."""
    routed_experts: bool = False
    """Also report which experts the routers chose."""
    router_weights: bool = False
    """With them their combine weights."""
    return_sampling_mask: bool = False
    """Also report which ids the filters left for each token."""

    @property
    def filters(self) -> bool:
        """Whether some ids may never be sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, kw_only=True, eq=False)
class ResponseColumns:
    """Columns of a response that engines report when they are asked to. R response tokens.

    ``types.token_columns`` declares them, and the columns that every response has.
    """

    topk_token_ids: Tensor | None = None
    """[R, K+1] int32. Slots 0 to K-1: the most probable tokens by rank; slot K: the sampled token where it is not one
    of them, else -1. -1 marks an unused slot everywhere."""
    topk_logprobs: Tensor | None = None
    """[R, K+1] float32, their log-probabilities; -inf = never sampled (a filter), which is a valid value"""
    sampling_mask: SamplingMask | None = None
    """of R tokens, where that was asked for: ``logprobs`` and the Top-K are of the softmax over them; given tokens have
    none"""
    routed_experts: Tensor | None = None
    """[P + R - 1, L, k] uint8 or int16: the experts that the engine's routers chose for each token of prompt and
    response but the last, in each of the model's L layers; k = experts a token. See ``MISSING_EXPERT``. With
    ``SamplingParams.router_weights`` the rows are wider: ``RoutingShape.width``."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion(ResponseColumns):
    """What an engine returns for one prompt. R response tokens, the end-of-sequence token included."""

    token_ids: Tensor
    """[R] int32"""
    logprobs: Tensor | None
    """[R] float32, log-probability of each token under the policy that sampled it, at the sampling temperature."""
    finish_reason: FinishReason
    policy_version: int
    """Version of the weights that produced the tokens; the newest one where there were several."""
    text: str
    """Decoded response without special tokens."""
    policy_versions: tuple[VersionSpan, ...] = ()
    """Which weights sampled which tokens; empty = all of them ``policy_version``. Given tokens are in no span."""
    loss_mask: Tensor | None = None
    """[R] bool, False on tokens that were given, not sampled (a tool's, a user's); None = all were sampled. At a given
    token ``logprobs`` holds 0.0 and the Top-K only unused slots: neither means anything."""
    reward: float | None = None
    """What ``rollout.generate`` or an agent gave; None = the reward function is asked"""
    failure: str = ""
    """Why an agent failed; such a sample carries no training signal"""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Numbers of how it was made; the mean of each is a metric, ``rollout/NAME``"""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """A completion with its reward."""

    prompt: Prompt
    completion: Completion
    reward: float
    """What training uses: the score with its shaping."""
    reward_failed: bool = False
    """True when the reward function raised or timed out; such a sample carries no training signal."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """``score`` (without shaping) and the named parts; empty when the reward is one unshaped number."""
    eval_score: float | None = None
    """The score of the one function that ``reward.functions`` marks with ``eval``, also where another one failed."""

    @property
    def score(self) -> float:
        """What accuracy is computed from: ``eval_score``, else the reward without shaping."""
        return self.reward_parts.get("score", self.reward) if self.eval_score is None else self.eval_score


@dataclass(frozen=True, kw_only=True)
class RolloutGroup:
    """The siblings of one prompt: the unit over which group-relative advantages are computed."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
