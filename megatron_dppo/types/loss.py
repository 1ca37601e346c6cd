"""What losses take and give, and what an update did."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

SlotSums = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(log pi ``[n, S]``, log mu ``[n, S]``, valid ``[n, S]``) -> ``[n, C]``, additive over disjoint parts of the slots"""


class Metric(NamedTuple):
    """A metric before its reduction over micro-batches and ranks.

    ``mean``: value is sum(numerator) / sum(denominator); ``max``: value is the maximum numerator and the
    denominator is ignored.
    """

    numerator: Tensor | float
    denominator: Tensor | float = 1.0
    kind: Literal["mean", "max"] = "mean"


@dataclass(frozen=True, kw_only=True)
class LossNeeds:
    """What a loss needs of a head beside the statistics that every loss gets."""

    entropy_gradient: bool = False
    """the entropy with a gradient"""
    other_square: bool = False
    """``topk_other_square``"""
    slot_gradient: bool = False
    """log pi at the Top-K ids with a gradient; not with ``topk_sums``"""
    topk_sums: SlotSums | None = None
    """all that it needs of the Top-K slots: several shards may exchange these sums in their place; None = the slots
    themselves, or nothing of them"""


NO_NEEDS = LossNeeds()


class Divergence(NamedTuple):
    """How far a policy is from its teacher, as a term of the loss of each token (docs/distillation.md)."""

    name: str
    """``reverse_kl``, KL(policy || teacher), or ``forward_kl``, KL(teacher || policy)."""
    coef: float = 1.0


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """Per-token inputs of every policy loss. T tokens, K Top-K candidates.

    Example: two sampled tokens and one of the prompt, for a Binary loss.

        >>> inputs = LossInputs(
        ...     logprobs=torch.tensor([0.0, -0.7, -0.1], requires_grad=True),
        ...     rollout_logprobs=torch.tensor([0.0, -0.9, -0.7]),
        ...     advantages=torch.tensor([0.0, 1.0, 1.0]),
        ...     loss_mask=torch.tensor([False, True, True]),
        ... )
        >>> inputs.topk_logprobs is None
        True
    """

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
    Top-K by rank; slot K holds the sampled token, and is valid only where that is not among the Top-K. Carries a
    gradient for score centering only."""
    rollout_topk_logprobs: Tensor | None = None
    """[T, K+1] log mu at the same ids; -inf = the engine never samples this id (top-p), which is a valid value"""
    topk_valid: Tensor | None = None
    """[T, K+1] bool, False = an unused slot; what stands there is ignored. The ids of valid slots are distinct."""
    topk_other_logprob: Tensor | None = None
    """[T] log of pi's mass outside the valid slots, summed without cancellation; None = 1 minus the slots"""
    topk_other_square: Tensor | None = None
    """[T] sum of pi^2 over the ids outside the valid slots; for the predicted direction with its exact tail"""
    topk_sums: Tensor | None = None
    """[T, 2] ``losses.topk_sums`` of all slots, or [T, 6] ``losses.predictive_sums``, in place of ``topk_logprobs``:
    shards of a vocabulary can add it up without exchanging the slots. Needs ``topk_other_logprob``; not with
    eviction, nor for score centering."""
    vocab_size: int | None = None
    """V without padding; for the predicted direction with a uniform tail"""
    allowed_counts: Tensor | None = None
    """[T] int on the CPU, how many ids a sampling filter left to a token, over which pi and mu are distributions then;
    0 = all"""
    recomputed_logprobs: Tensor | None = None
    """[T] log-probabilities recomputed by the trainer at the rollout's weights; only for the losses named so"""
    reference_logprobs: Tensor | None = None
    """[T] log-probabilities of the labels under a frozen reference policy, for the KL penalty"""
    sequence_ids: Tensor | None = None
    """[T] int64 from 0, for sequence-level losses; each sequence must be in these inputs as a whole"""
    token_weights: Tensor | None = None
    """[T] float, the aggregation as per-token weights (``losses.token_weights``); None = 1 everywhere"""


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """Sums, never means: the caller divides once, by a global count.

    Example: two micro-batches of a step become one loss.

        >>> keep = torch.tensor([True])
        >>> sums = [LossOutput(loss_sum=torch.tensor(v), num_tokens=torch.tensor(n), keep_mask=keep, metrics={})
        ...         for v, n in ((-3.0, 4), (1.0, 1))]
        >>> sum(output.loss_sum for output in sums) / sum(output.num_tokens for output in sums)
        tensor(-0.4000)
    """

    loss_sum: Tensor
    """scalar, carries the gradient"""
    num_tokens: Tensor
    """scalar, tokens in the loss mask (masked-out updates stay in the count)"""
    keep_mask: Tensor
    """[T] bool, True = this token contributes gradient"""
    metrics: Mapping[str, Metric]
    logprobs: Tensor | None = None
    """[T] log pi of the tokens, without gradient, for those who record a step; None = the loss does not hand it on"""


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
    has_lower_scale: bool = False
    """It was an overflow of fp16, and the next updates have a lower loss scale: no sign of a fault."""
