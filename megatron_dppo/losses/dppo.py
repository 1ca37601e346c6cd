"""DPPO: mask tokens whose probability has left the trust region and would move further out.

    grad = - sum over t of  A_t min(r_t, C) keep_t grad log pi(a_t | s_t),        r_t = pi / mu
    keep_t = not (D_t > threshold and A_t (log pi - log mu) > 0)

Differentiated: log pi of the sampled token
Weight: pi / mu, capped (C = 5)
Mask: divergence of pi from mu, on the sampled token (Binary) or the rollout's Top-K, by token; outward updates
Source: arXiv 2602.04879, equations 11 to 16; predicted direction arXiv 2607.10848

Terms, with the same meaning everywhere in this package:

- *Anchor*: log mu, the log-probability that the engine reported when it sampled the token (``rollout_logprobs``).
  Trust region and weight are both anchored on it. The trainer never recomputes it.
- *Loss mask*: the tokens that are trained, usually those that the policy sampled (``loss_mask``).
- *Masked*: a token of the loss mask whose update the trust region removes. It has no gradient, and stays in the token
  count that the loss is divided by. All other tokens are *kept* (``keep_mask``). A token that leaves the loss mask
  before the loss is *dropped*, which is something else.
- *Sampling mask*: the ids that a sampling filter (top-p, top-k, min-p) allows at a position (``SamplingMask``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from megatron_dppo import losses
from megatron_dppo.config.loss_groups import DivergenceThresholds, RatioCap
from megatron_dppo.config.user_functions import FunctionNeeds
from megatron_dppo.losses.adaptive import AdaptiveThresholds
from megatron_dppo.losses.rule import Loss

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_dppo.config.loss import LossConfig, TopKSummary
    from megatron_dppo.types import LossInputs, LossOutput


def divergence_keep_mask(
    divergence: Tensor,
    direction: Tensor,
    advantages: Tensor,
    threshold_low: float | Tensor,
    threshold_high: float | Tensor,
) -> Tensor:
    """Return the trust-region mask of DPPO, False = masked (arXiv 2602.04879, equation 12).

    Args:
        divergence: D. Shape [num_tokens]. For example from ``binary_tv``.
        direction: Shape [num_tokens]. Only the sign is read: above 0, an update with a positive advantage leads away
            from mu. Either log pi(a_t) - log mu(a_t), the direction in which pi has moved, or a ``divergence_rate``.
        advantages: Shape [num_tokens]. The sign is the direction of the update.
        threshold_low: Limit for negative advantages (the probability goes down).
        threshold_high: Limit for positive advantages (the probability goes up).

    Returns:
        Bool, shape [num_tokens]. A token on the threshold and a token with advantage 0 are kept.
    """
    # This is the whole idea of DPPO. An update is masked if pi is outside the trust region around mu
    # (divergence > threshold) AND the update leads further out; one that leads back is always kept.
    # ``~(D <= limit)`` and not ``D > limit``: a NaN divergence counts as outside.
    masked_going_up = (advantages > 0) & (direction > 0) & ~(divergence <= threshold_high)
    masked_going_down = (advantages < 0) & (direction < 0) & ~(divergence <= threshold_low)
    return ~(masked_going_up | masked_going_down)


def dppo_reference(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    threshold: float = 0.15,
    ratio_cap: float = 5.0,
) -> Tensor:
    """Return the loss of DPPO-Binary-TV in plain torch, as a scalar.

    It is the same sum as ``policy_loss``, without metrics, penalties and other options. Read it to understand the loss;
    tests compare ``policy_loss`` with it. All tensors are ``[num_tokens]``; the threshold is a total variation.
    """
    log_ratio = logprobs.detach() - rollout_logprobs
    # Binary TV (equation 13): how much probability of the sampled token has moved since it was sampled.
    divergence = (logprobs.detach().exp() - rollout_logprobs.exp()).abs()
    # Would the update move the token further away from mu?
    outward = advantages * log_ratio > 0
    keep = mask & (advantages != 0) & ~(outward & (divergence > threshold))
    # Without a finite log mu nothing is known of how the token was sampled.
    keep = keep & rollout_logprobs.isfinite()
    # At pi = 0 the term r log pi tends to 0, and so does its gradient.
    keep = keep & (logprobs.detach() > float("-inf"))
    # exp(80) is finite in fp32; the cap applies afterwards.
    weight = log_ratio.clamp(max=80.0).exp().clamp(max=ratio_cap)
    return -(advantages[keep] * weight[keep] * logprobs[keep]).sum()


class DPPOConfig(DivergenceThresholds, RatioCap, Loss):
    """Keys of all ``dppo_*`` losses."""

    ratio_cap: Annotated[float, Field(gt=0)] | Literal["off"] | None = None
    """Cap C of the weight min(r, C). ``off`` disables it. null uses 5 for ``dppo_*``, as in the paper's runs."""
    divergence_threshold_low: float | None = Field(None, gt=0)
    """Trust-region limit for negative advantages. null uses 0.15 (TV) or 0.05 (KL) for ``dppo_*``."""
    divergence_threshold_high: float | None = Field(None, gt=0)
    """Trust-region limit for positive advantages. null uses 0.15 (TV) or 0.05 (KL) for ``dppo_*``."""

    default_cap: ClassVar[float] = 5.0

    @property
    def kind(self) -> Literal["tv", "kl"]:
        """Divergence: total variation, or KL(mu || pi)."""
        return "kl" if self.name.endswith("_kl") else "tv"

    @property
    def default_threshold(self) -> float:
        """Threshold on both sides where none is set."""
        return 0.05 if self.kind == "kl" else 0.15

    @property
    def is_total_variation(self) -> bool:
        """True if the thresholds limit a total variation, which is at most 1."""
        return self.kind == "tv"


class BinaryDPPO(AdaptiveThresholds, DPPOConfig):
    """DPPO on the two events "the sampled token" and "any other token".

    Example:
        The second of three tokens has moved 0.4, more than 0.15, and would move on: it is masked. The third has moved
        as far, but its update leads back. A gradient is minus the ratio times the advantage.

        >>> losses.show(BinaryDPPO(), pi=[0.5, 0.9, 0.9], mu=[0.4, 0.5, 0.5], advantages=[1.0, 1.0, -1.0])
        kept      True False  True
        gradient -1.25  0.00  1.80
    """

    name: Literal["dppo_binary_tv", "dppo_binary_kl"] = "dppo_binary_tv"

    can_center: ClassVar[bool] = True

    def decide(self, tokens: losses.Tokens) -> losses.Decision:
        """Mask outward updates of tokens that are beyond the threshold of their side."""
        measure = losses.binary_kl if self.kind == "kl" else losses.binary_tv
        divergence = measure(tokens.logprobs, tokens.rollout_logprobs)
        limits = losses.adapted_limits(self.thresholds, tokens, self)
        keep = divergence_keep_mask(divergence, tokens.log_ratio, tokens.advantages, *limits)
        return losses.weigh_by_ratio(tokens, divergence, keep)


class TopKDPPO(AdaptiveThresholds, DPPOConfig):
    """DPPO on the rollout's Top-K ids, the sampled id, and one bucket for all other ids.

    Example:
        The sampled token has not moved, but the two others have swapped: half of the mass 0.6 has moved.

        >>> losses.show(TopKDPPO(topk=2), pi=[0.41, 0.9], mu=[0.4, 0.89], advantages=[1.0, 1.0])
        kept     False  True
        gradient  0.00 -1.01
    """

    name: Literal["dppo_topk_tv", "dppo_topk_kl"] = "dppo_topk_tv"
    topk_eviction: bool = False
    """A sampled token outside the Top-K replaces the K-th instead of joining the set."""
    direction: Literal["sampled", "predictive"] = "sampled"
    """Test of whether an update leads outward: the sampled token's log pi - log mu, or the derivative of the divergence
    along the update (with a Binary divergence the two are the same)."""
    tail: Literal["proportional", "aggregated", "uniform"] = "proportional"
    """Sum of pi^2 outside the Top-K set, exact or estimated; only with ``direction = "predictive"``."""

    can_center: ClassVar[bool] = True

    @property
    def needs(self) -> FunctionNeeds:
        """The Top-K, and the exact tail if the predicted direction uses it."""
        # The other two tails follow from pi's mass outside the set, which every Top-K loss has.
        needs_exact_tail = self.direction == "predictive" and self.tail == "proportional"
        return FunctionNeeds(topk=True, topk_other_square=needs_exact_tail, zero_advantage=False)

    @property
    def topk_summary(self) -> TopKSummary | None:
        """Sums over the slots are enough, unless a single slot is evicted."""
        if self.topk_eviction:
            return None
        return "rate" if self.direction == "predictive" else "divergence"

    @property
    def evicts_topk(self) -> bool:
        """True if a sampled token outside the Top-K replaces the K-th."""
        return self.topk_eviction

    def unused_keys(self) -> dict[str, str]:
        """Add the tail if the direction is not predicted."""
        unused = super().unused_keys()
        return unused if self.direction == "predictive" else unused | {"tail": "direction = 'predictive'"}

    def input_reasons(self) -> dict[str, str]:
        """Add the inputs of the tail."""
        reasons = super().input_reasons()
        if self.direction == "predictive" and self.tail != "aggregated":
            reasons["topk_other_square" if self.tail == "proportional" else "vocab_size"] = "loss.tail"
        return reasons

    def decide(self, tokens: losses.Tokens) -> losses.Decision:
        """Mask outward updates of tokens that are beyond the threshold of their side."""
        divergence = tokens.topk_set.divergence(self.kind).to(tokens.log_ratio.dtype)
        limits = losses.adapted_limits(self.thresholds, tokens, self)
        keep = divergence_keep_mask(divergence, self._direction(tokens), tokens.advantages, *limits)
        return losses.weigh_by_ratio(tokens, divergence, keep)

    def _direction(self, tokens: losses.Tokens) -> Tensor:
        """Return the direction that ``divergence_keep_mask`` reads, [num_tokens]."""
        if self.direction == "sampled":
            return tokens.log_ratio
        rate = tokens.topk_set.rate(self.kind, self.tail, tokens.logprobs, tokens.rollout_logprobs)
        # A NaN has no sign, so it would mask nothing: fall back to the sampled direction.
        return tokens.log_ratio.where(rate.isnan(), rate)


def dppo_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """Compute a DPPO loss, for use inside another trainer.

    Arguments, result and errors are those of ``policy_loss``.

    Example: The second of two tokens has moved 0.4 from its rollout probability, more than the 0.15 of DPPO-Binary-TV,
    and would move on. It gets no gradient; the first gets minus its ratio 0.5 / 0.4.

        >>> inputs = LossInputs(
        ...     logprobs=torch.tensor([0.5, 0.9]).log().requires_grad_(),
        ...     rollout_logprobs=torch.tensor([0.4, 0.5]).log(),
        ...     advantages=torch.tensor([1.0, 1.0]),
        ...     loss_mask=torch.tensor([True, True]),
        ... )
        >>> output = dppo_loss(inputs, LossConfig(name="dppo_binary_tv"))
        >>> output.keep_mask
        tensor([ True, False])
        >>> output.loss_sum.backward()
        >>> inputs.logprobs.grad
        tensor([-1.2500,  0.0000])

    Raises:
        ValueError: If ``config.name`` is not a ``dppo_*`` loss, or as in ``policy_loss``.
    """
    if not isinstance(config, DPPOConfig):
        names = ["dppo_binary_kl", "dppo_binary_tv", "dppo_topk_kl", "dppo_topk_tv", "dppo_recompute_*"]
        raise ValueError(
            f"Expected one of the losses {names} in dppo_loss, got {config.name!r}. Fix: call policy_loss, which takes "
            "any loss."
        )
    return losses.policy_loss(inputs, config)
