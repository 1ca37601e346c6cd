"""DPPO: drop tokens whose probability has left the trust region and would move further out.

    grad = - sum over t of  A_t min(r_t, C) keep_t grad log pi(a_t | s_t),        r_t = pi / mu
    keep_t = not (D_t > threshold and A_t (log pi - log mu) > 0)

Differentiated: log pi of the sampled token
Weight: pi / mu, capped (C = 5)
Mask: divergence of pi from mu, on the sampled token (Binary) or the rollout's Top-K, by token; outward updates
Source: arXiv 2602.04879, equations 11 to 16; predicted direction arXiv 2607.10848

mu is the rollout policy: the log-probabilities that the engine reported when it sampled, never recomputed ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from megatron_dppo import losses
from megatron_dppo.config.loss_groups import DivergenceThresholds, RatioCap
from megatron_dppo.config.user_functions import FunctionNeeds
from megatron_dppo.losses.parts.loss import Loss

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_dppo.config.loss import LossConfig, TopKSummary
    from megatron_dppo.losses import Decision, Tokens
    from megatron_dppo.types import LossInputs, LossOutput


def dppo_reference(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    threshold: float = 0.15,
    ratio_cap: float = 5.0,
) -> Tensor:
    """Return the loss of DPPO-Binary-TV, a scalar, in plain torch: for reading, and for tests to compare with.

    All tensors are ``[T]``; ``mask`` is bool. ``policy_loss`` is the same sum, with more of everything around it.
    """
    log_ratio = logprobs.detach() - rollout_logprobs
    moved = (logprobs.detach().exp() - rollout_logprobs.exp()).abs()  # mass of the sampled token: Binary TV
    outward = advantages * log_ratio > 0  # the update would move it further
    keep = mask & (advantages != 0) & ~(outward & (moved > threshold))
    keep = keep & rollout_logprobs.isfinite()  # nothing is known of how it was sampled
    keep = keep & (logprobs.detach() > float("-inf"))  # r log pi tends to 0, and so does its gradient
    weight = log_ratio.clamp(max=80.0).exp().clamp(max=ratio_cap)
    return -(advantages[keep] * weight[keep] * logprobs[keep]).sum()


class DPPOConfig(DivergenceThresholds, RatioCap, Loss):
    """Keys of all ``dppo_*`` losses."""

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
        """Whether the thresholds are of a total variation, which is at most 1."""
        return self.kind == "tv"


class BinaryDPPO(DPPOConfig):
    """DPPO on the two events "this token" and "any other".

    Example:
        The second of three tokens has moved 0.4, more than 0.15, and would move on. So has the third, but its update
        leads back. A gradient is minus the ratio times the advantage.

        >>> losses.show(BinaryDPPO(), pi=[0.5, 0.9, 0.9], mu=[0.4, 0.5, 0.5], advantages=[1.0, 1.0, -1.0])
        kept      True False  True
        gradient -1.25  0.00  1.80
    """

    name: Literal["dppo_binary_tv", "dppo_binary_kl"] = "dppo_binary_tv"

    def decide(self, tokens: Tokens) -> Decision:
        """Drop what is beyond the threshold of its side and leads outward."""
        measure = losses.binary_kl if self.kind == "kl" else losses.binary_tv
        divergence = measure(tokens.logprobs, tokens.rollout_logprobs)
        keep = losses.divergence_keep_mask(divergence, tokens.log_ratio, tokens.advantages, *self.thresholds)
        return losses.weigh_by_ratio(tokens, divergence, keep)


class TopKDPPO(DPPOConfig):
    """DPPO on the rollout's Top-K ids, the sampled one, and one bucket for the rest.

    Example:
        The sampled token has not moved, but the two others have changed places: half of the mass 0.6 has moved.

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

    @property
    def needs(self) -> FunctionNeeds:
        """The Top-K, and the exact tail where the direction is predicted by it."""
        exact = self.direction == "predictive" and self.tail == "proportional"
        return FunctionNeeds(topk=True, topk_other_square=exact, zero_advantage=False)

    @property
    def topk_summary(self) -> TopKSummary | None:
        """Sums over the slots are enough, unless a single one is evicted."""
        if self.topk_eviction:
            return None
        return "rate" if self.direction == "predictive" else "divergence"

    @property
    def evicts_topk(self) -> bool:
        """A sampled token outside the Top-K replaces the K-th."""
        return self.topk_eviction

    def unused_keys(self) -> dict[str, str]:
        """Add the tail without a predicted direction."""
        idle = super().unused_keys()
        return idle if self.direction == "predictive" else idle | {"tail": "direction = 'predictive'"}

    def input_reasons(self) -> dict[str, str]:
        """Add the inputs of the tail."""
        why = super().input_reasons()
        if self.direction == "predictive" and self.tail != "aggregated":
            why["topk_other_square" if self.tail == "proportional" else "vocab_size"] = "loss.tail"
        return why

    def decide(self, tokens: Tokens) -> Decision:
        """Drop what is beyond the threshold of its side and leads outward."""
        divergence = tokens.topk_set.divergence(self.kind).to(tokens.log_ratio.dtype)
        keep = losses.divergence_keep_mask(divergence, self._direction(tokens), tokens.advantages, *self.thresholds)
        return losses.weigh_by_ratio(tokens, divergence, keep)

    def _direction(self, tokens: Tokens) -> Tensor:
        """Return ``[T]``: above 0 = an update with a positive advantage leads outward."""
        if self.direction == "sampled":
            return tokens.log_ratio
        rate = tokens.topk_set.rate(self.kind, self.tail, tokens.logprobs, tokens.rollout_logprobs)
        # A NaN leads nowhere, and nothing would be dropped.
        return tokens.log_ratio.where(rate.isnan(), rate)


def dppo_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """A DPPO loss, for use inside another trainer; arguments, result and errors are those of ``policy_loss``.

    Example: the second of two tokens has moved 0.4 from its rollout probability, more than the 0.15 of DPPO-Binary-TV,
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
        ValueError: also when ``config.name`` is not a ``dppo_*`` loss.
    """
    if not isinstance(config, DPPOConfig):
        names = ["dppo_binary_kl", "dppo_binary_tv", "dppo_topk_kl", "dppo_topk_tv", "dppo_recompute_*"]
        raise ValueError(f"dppo_loss got the loss {config.name!r}, expected one of {names}; policy_loss takes any name")
    return losses.policy_loss(inputs, config)
