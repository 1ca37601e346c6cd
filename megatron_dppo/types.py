"""The records that flow through one step, each made in one place.

    Prompt -> Completion -> Rollout / RolloutGroup -> TrainingSample -> MicroBatch
           -> LossInputs -> LossOutput -> StepResult

Conventions, fixed here and nowhere else:

- *Alignment.* A sequence of S tokens gives per-token tensors of length T = S - 1. Position ``t`` of each of
  them describes the prediction of ``labels[t] = sequence[t + 1]`` from ``tokens[t] = sequence[t]``.
- *Missing is None.* A field that does not apply is None, never zero.
- *Log-probabilities* are natural logarithms of the distribution that was sampled from (after temperature).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

FinishReason = Literal["stop", "length"]
MISSING_EXPERT: Mapping[torch.dtype, int] = {torch.uint8: 255, torch.int16: -1}
"""What stands in ``routed_experts`` where a router's choice is not known, by dtype."""


@dataclass(frozen=True, kw_only=True)
class RoutingShape:
    """The sizes of a mixture-of-experts model that routes ``[tokens, L, k]`` have to fit."""

    num_layers: int
    """L, dense layers included"""
    num_experts: int
    topk: int
    """k, experts a token"""
    dense_layers: frozenset[int] = frozenset()
    """layers without a router, from 0; their rows are missing"""

    @property
    def dtype(self) -> torch.dtype:
        """The smallest one that holds every expert and the missing value."""
        return torch.uint8 if self.num_experts <= MISSING_EXPERT[torch.uint8] else torch.int16


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


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How an engine samples. ``temperature`` 0 means greedy; ``top_p`` 1 and ``top_k`` 0 mean no filter."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    topk_logprobs: int = 0
    """K: also report the K most probable tokens of every position; 0 = none."""
    routed_experts: bool = False
    """Also report which experts the routers chose."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What an engine returns for one prompt. R response tokens, the end-of-sequence token included."""

    token_ids: tuple[int, ...]
    """[R]"""
    logprobs: tuple[float, ...] | None
    """[R] log-probability of each token under the policy that sampled it, at the sampling temperature."""
    finish_reason: FinishReason
    policy_version: int
    """Version of the weights that produced the tokens; the newest one where there were several."""
    text: str
    """Decoded response without special tokens."""
    topk_token_ids: Tensor | None = field(default=None, compare=False)
    """[R, K+1] int32. Slots 0 to K-1: the most probable tokens by rank; slot K: the sampled token where it is not one
    of them, else -1. -1 marks an unused slot everywhere."""
    topk_logprobs: Tensor | None = field(default=None, compare=False)
    """[R, K+1] float32, their log-probabilities; -inf = never sampled (a filter), which is a valid value"""
    routed_experts: Tensor | None = field(default=None, compare=False)
    """[P + R - 1, L, k] uint8 or int16: the experts that the engine's routers chose for each token of prompt and
    response but the last, in each of the model's L layers; k = experts a token. See ``MISSING_EXPERT``."""
    policy_versions: tuple[VersionSpan, ...] = ()
    """Which weights sampled which tokens; empty = all of them ``policy_version``. Given tokens are in no span."""
    loss_mask: tuple[bool, ...] | None = None
    """[R] False on tokens that were given, not sampled (a tool's, a user's); None = all were sampled. At a given token
    ``logprobs`` holds 0.0 and the Top-K only unused slots: neither means anything."""
    reward: float | None = None
    """What ``rollout.generate`` gave; None = the reward function is asked"""


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

    @property
    def score(self) -> float:
        """The reward without shaping: what accuracy is computed from."""
        return self.reward_parts.get("score", self.reward)


@dataclass(frozen=True, kw_only=True)
class RolloutGroup:
    """The siblings of one prompt: the unit over which group-relative advantages are computed."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]


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
    anchor_logprobs: Tensor | None = None
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
    routed_experts: Tensor | None = None
    """[T, L, k] uint8 or int16, the experts that are replayed: row t belongs to the input token t"""

    @property
    def num_tokens(self) -> int:
        """Length T."""
        return int(self.tokens.numel())


@dataclass(frozen=True, kw_only=True)
class TokenTargets(TokenFields):
    """What a loss needs of each token of a row, or of some tokens of it."""

    sequence_ids: Tensor | None = None
    """[T] int64, index of the sequence inside the row"""
    token_weights: Tensor | None = None
    """[T] float32, the aggregation as per-token weights; None = 1 everywhere"""

    def select(self, rows: Tensor | slice) -> TokenTargets:
        """The tokens at ``rows``, in that order."""
        columns = ((f.name, getattr(self, f.name)) for f in fields(TokenTargets))
        chosen: dict[str, Any] = {name: None if column is None else column[rows] for name, column in columns}
        return TokenTargets(**chosen)


@dataclass(frozen=True, kw_only=True)
class MicroBatch(TokenTargets):
    """Several sequences packed end to end into one row of T tokens (Megatron's THD layout)."""

    tokens: Tensor
    """[T] int64"""
    routed_experts: Tensor | None = None
    """[T, L, k] uint8 or int16, missing on padding"""
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
        tensors: dict[str, Any] = {
            k: v.to(device, non_blocking=True) for k, v in vars(self).items() if isinstance(v, Tensor)
        }
        return replace(self, **tensors)


class Metric(NamedTuple):
    """A metric before its reduction over micro-batches and ranks.

    ``mean``: value is sum(numerator) / sum(denominator); ``max``: value is the maximum numerator and the
    denominator is ignored.
    """

    numerator: Tensor | float
    denominator: Tensor | float = 1.0
    kind: Literal["mean", "max"] = "mean"


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """Per-token inputs of every policy loss. T tokens, K Top-K candidates."""

    logprobs: Tensor
    """[T] log pi(a_t|s_t) of the policy being trained, at the rollout temperature; carries the gradient"""
    advantages: Tensor
    """[T]"""
    loss_mask: Tensor
    """[T] bool"""
    rollout_logprobs: Tensor | None = None
    """[T] log mu(a_t|s_t), as the rollout engine reported it. Never a recomputed value."""
    entropy: Tensor | None = None
    """[T] entropy of pi(.|s_t), in nats"""
    topk_logprobs: Tensor | None = None
    """[T, K+1] log pi at the ids of the set TopK(mu, K) plus the sampled token. Slots 0 to K-1 hold the rollout's
    Top-K by rank; slot K holds the sampled token, and is valid only where that is not among the Top-K."""
    rollout_topk_logprobs: Tensor | None = None
    """[T, K+1] log mu at the same ids; -inf = the engine never samples this id (top-p), which is a valid value"""
    topk_valid: Tensor | None = None
    """[T, K+1] bool, False = an unused slot; what stands there is ignored. The ids of valid slots are distinct."""
    topk_other_logprob: Tensor | None = None
    """[T] log of pi's mass outside the valid slots, summed without cancellation; None = 1 minus the slots"""
    topk_sums: Tensor | None = None
    """[T, 2] ``losses.topk_sums`` of all slots, in place of ``topk_logprobs``: shards of a vocabulary can add it up
    without exchanging the slots. Needs ``topk_other_logprob``; not with eviction."""
    anchor_logprobs: Tensor | None = None
    """[T] log-probabilities recomputed by the trainer at the rollout's weights; only for the losses named so"""
    reference_logprobs: Tensor | None = None
    """[T] log-probabilities of the labels under a frozen reference policy, for the KL penalty"""
    sequence_ids: Tensor | None = None
    """[T] int64 from 0, for sequence-level losses; each sequence must be in these inputs as a whole"""
    token_weights: Tensor | None = None
    """[T] float, the aggregation as per-token weights (``losses.token_weights``); None = 1 everywhere"""


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """Sums, never means: the caller divides once, by a global count."""

    loss_sum: Tensor
    """scalar, carries the gradient"""
    num_tokens: Tensor
    """scalar, tokens in the loss mask (masked-out updates stay in the count)"""
    keep_mask: Tensor
    """[T] bool, True = this token contributes gradient"""
    metrics: Mapping[str, Metric]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one optimizer update did."""

    policy_version: int
    """Version of the weights after the update."""
    grad_norm: float
    learning_rate: float
    skipped: bool
    """True when the gradient was not finite and the update was not applied."""
    metrics: Mapping[str, float]
    """Globally reduced values."""
