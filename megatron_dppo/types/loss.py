"""Inputs and outputs of losses, and the result of an optimizer update."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor

SlotSums = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function (log pi ``[n, S]``, log mu ``[n, S]``, valid ``[n, S]``) -> ``[n, C]``, additive over disjoint slots."""


class Metric(NamedTuple):
    """A metric before its reduction over micro-batches and ranks.

    ``mean``: the value is sum(numerator) / sum(denominator). ``max``: the value is the largest numerator, and the
    denominator is ignored.
    """

    numerator: Tensor | float
    denominator: Tensor | float = 1.0
    kind: Literal["mean", "max"] = "mean"


@dataclass(frozen=True, kw_only=True)
class LossNeeds:
    """Statistics that a loss needs from a head, in addition to those that every loss gets."""

    entropy_gradient: bool = False
    """The entropy with a gradient."""
    other_square: bool = False
    """``topk_other_square``."""
    slot_gradient: bool = False
    """Log pi at the Top-K ids with a gradient. Cannot be combined with ``topk_sums``."""
    topk_sums: SlotSums | None = None
    """Sums over the Top-K slots that the loss reads instead of the slots; several shards then exchange only these sums.
    None: the loss reads single slots, or no Top-K."""


NO_NEEDS = LossNeeds()


class Divergence(NamedTuple):
    """Divergence from a teacher, added to the loss of each token (docs/distillation.md)."""

    name: str
    """``reverse_kl``, KL(policy || teacher), or ``forward_kl``, KL(teacher || policy)."""
    coef: float = 1.0


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """Per-token inputs of every policy loss. T tokens, K Top-K candidates.

    Example: Two sampled tokens and one of the prompt, for a Binary loss.

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
    """Log pi(a_t|s_t) of the policy being trained, at the rollout temperature. Shape [T]. Carries the gradient."""
    advantages: Tensor
    """Advantages. Shape [T]."""
    loss_mask: Tensor
    """The *loss mask*: True on tokens that are trained. Bool, shape [T]."""
    # Known for every sampled token, and given to every loss. None only for a supervised loss.
    rollout_logprobs: Tensor | None = None
    """Log mu(a_t|s_t), the *anchor*: as reported by the rollout engine, never a recomputed value. Shape [T]."""
    entropy: Tensor | None = None
    """Entropy of pi(.|s_t), in nats. Shape [T]."""
    # Top-K losses: the rollout's K most probable ids and the sampled one.
    topk_logprobs: Tensor | None = None
    """Log pi at the ids of the set TopK(mu, K) plus the sampled token. Shape [T, K+1]. Slots 0 to K-1 hold the
    rollout's Top-K by rank. Slot K holds the sampled token, and is valid only if that is not among the Top-K. Carries a
    gradient for score centering only."""
    rollout_topk_logprobs: Tensor | None = None
    """Log mu at the same ids. Shape [T, K+1]. -inf is a valid value: the engine never samples this id (top-p)."""
    topk_valid: Tensor | None = None
    """True on used slots. Bool, shape [T, K+1]. Values of unused slots are ignored. The ids of used slots are
    distinct."""
    topk_other_logprob: Tensor | None = None
    """Log of pi's mass outside the valid slots, summed without cancellation. Shape [T]. None means 1 minus the
    slots."""
    topk_other_square: Tensor | None = None
    """Sum of pi^2 over the ids outside the valid slots. Shape [T]. For the predicted direction with its exact tail."""
    topk_sums: Tensor | None = None
    """``losses.topk_sums`` of all slots, [T, 2], or ``losses.predictive_sums``, [T, 6]. They replace ``topk_logprobs``:
    shards of a vocabulary can add them up without exchanging the slots. They need ``topk_other_logprob``, and work
    neither with eviction nor for score centering."""
    vocab_size: int | None = None
    """V without padding; for the predicted direction with a uniform tail."""
    allowed_counts: Tensor | None = None
    """Number of ids that the *sampling mask* of each token allows. pi and mu are distributions over these ids. Int on
    the CPU, shape [T]. 0 means the whole vocabulary."""
    # Columns that a loss gets only if its ``required_inputs`` name them, besides ``token_weights``.
    recomputed_logprobs: Tensor | None = None
    """Log pi'(a_t|s_t), recomputed by the trainer at the rollout's weights. Shape [T]. Only some losses read it."""
    reference_logprobs: Tensor | None = None
    """Log-probabilities of the labels under a frozen reference policy, for the KL penalty. Shape [T]."""
    ages: Tensor | None = None
    """Age of each token: optimizer updates between the weights that sampled it and the policy. Shape [T]."""
    sequence_ids: Tensor | None = None
    """Index of each token's sequence, from 0, for sequence-level losses. Int64, shape [T]. Sequences must be
    complete."""
    token_weights: Tensor | None = None
    """Aggregation as per-token weights (``losses.token_weights``). Float, shape [T]. None means 1 everywhere."""
    statistics: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the whole batch that the loss declares, by name (``losses.batch_statistics``)."""


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """Sums, never means: the caller divides once, by a global count.

    Example: Two micro-batches of a step become one loss.

        >>> keep = torch.tensor([True])
        >>> sums = [LossOutput(loss_sum=torch.tensor(v), num_tokens=torch.tensor(n), keep_mask=keep, metrics={})
        ...         for v, n in ((-3.0, 4), (1.0, 1))]
        >>> sum(output.loss_sum for output in sums) / sum(output.num_tokens for output in sums)
        tensor(-0.4000)
    """

    loss_sum: Tensor
    """Sum of the token losses, a scalar. Carries the gradient."""
    num_tokens: Tensor
    """Number of tokens in the loss mask, a scalar. Tokens that the trust region masks are counted."""
    keep_mask: Tensor
    """True on tokens that contribute a gradient; a token of the loss mask with False is *masked*. Bool, shape [T]."""
    metrics: Mapping[str, Metric]
    """Metrics of the tokens, not reduced."""
    # Without gradient, for recording a step and for the guard. None if the loss does not return them. Shape [T].
    logprobs: Tensor | None = None
    """Log pi of the tokens."""
    entropy: Tensor | None = None
    """Entropy of pi at the tokens, in nats."""
    divergence: Tensor | None = None
    """Divergence of pi from mu at the tokens, as the loss measures it."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of one optimizer update."""

    policy_version: int
    """Version of the weights after the update."""
    grad_norm: float
    """Global norm of the gradient before clipping."""
    learning_rate: float
    """Learning rate of the update."""
    skipped: bool
    """True if the gradient was not finite and the update was not applied."""
    metrics: Mapping[str, float]
    """Globally reduced values."""
    has_lower_scale: bool = False
    """True if fp16 overflowed and the next updates use a lower loss scale. This is normal and no sign of a fault."""
