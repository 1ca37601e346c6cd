"""Score centering: the policy gradient minus the part that comes from the choice of the sampler alone.

    loss = sum over t of  - A (f(r) log pi_k - sum over H of residual_i log pi_i)   (f and residual without gradient)
    residual_i = mu_i f(pi_i / mu_i) - alpha pi_i,    alpha = rho f(1 / rho),    rho = mu_other / pi_other

Differentiated: log pi of the sampled token k, and of the rollout's Top-K ids H
Weight: f(pi / mu): 1, capped (C = 2), or 0 outside the mismatch limits
Mask: none
Source: arXiv 2609.20807

With weights f(r) the sum over samples of ``f(r) grad log pi`` has the expectation ``sum over j of mu_j f(pi_j / mu_j)
grad log pi_j`` under the sampler, 0 only where pi = mu. It is subtracted, exactly on the head H = TopK(mu, K) (without
the sampled token, so that H does not depend on it), and outside of H as if mu were pi times rho. The last term of a
residual is the gradient of the other ids: ``sum over the others of grad pi_j = - sum over H of grad pi_i``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from megatron_dppo import losses
from megatron_dppo.config.loss import Form
from megatron_dppo.config.loss_groups import RatioCap
from megatron_dppo.config.user_functions import FunctionNeeds
from megatron_dppo.losses.parts.loss import Loss

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_dppo.losses import Decision, Tokens
    from megatron_dppo.types import LossInputs

_OTHER_FLOOR = 1e-6
"""Smallest mass outside the head, for both policies. The mass of mu is a difference of float32 numbers."""


class ScoreCentering(RatioCap, Loss):
    """Score centering: the weight f(r), minus its expectation under the sampler.

    Example:
        The gradient by log pi of the sampled token is that of ``cispo`` with a cap of 2. The Top-K ids have their own.

        >>> losses.show(ScoreCentering(topk=2), pi=[0.5, 0.9], mu=[0.4, 0.1], advantages=[1.0, -1.0])
        kept      True  True
        gradient -1.25  2.00
    """

    name: Literal["score_centering"] = "score_centering"
    ratio_cap: Annotated[float, Field(gt=0)] | Literal["off"] | None = None
    """C in min(r, C) for ``centering = "truncate"``; ``off`` disables it. null uses 2 for ``score_centering``."""
    centering: Literal["none", "truncate", "mask"] = "truncate"
    """Weight f: 1, min(r, ``ratio_cap``), or r inside [``mismatch_low``, ``mismatch_high``] and 0 outside."""

    default_cap: ClassVar[float] = 2.0
    forms: ClassVar[tuple[Form, ...]] = ("reinforce",)

    @property
    def needs(self) -> FunctionNeeds:
        """The Top-K, with the gradient of log pi at its ids."""
        return FunctionNeeds(topk=True, topk_gradient=True, zero_advantage=False)

    @property
    def ratio_limits(self) -> tuple[float, float]:
        """Floor and cap of the weight; 0 and infinity if there is none."""
        return super().ratio_limits if self.centering == "truncate" else (0.0, math.inf)

    def unused_keys(self) -> dict[str, str]:
        """Return the keys that the chosen weight f does not read."""
        idle = super().unused_keys()
        if self.centering == "mask":
            idle = {key: why for key, why in idle.items() if key not in ("mismatch_low", "mismatch_high")}
        if self.centering != "truncate":
            idle["ratio_cap"] = "centering = 'truncate'"
        return idle

    def decide(self, tokens: Tokens) -> Decision:
        """Keep every token, with the weight f."""
        decision = losses.weigh_by_ratio(tokens, losses.binary_tv(tokens.logprobs, tokens.rollout_logprobs))
        return decision._replace(weight=self._weight(decision.weight))

    def terms(self, inputs: LossInputs, tokens: Tokens, decision: Decision) -> tuple[Tensor, Tensor]:
        """Subtract the expected score under the sampler."""
        keep, policy_term = super().terms(inputs, tokens, decision)
        return keep, policy_term + self._centering_term(inputs, tokens, keep)

    def _centering_term(self, inputs: LossInputs, tokens: Tokens, keep: Tensor) -> Tensor:
        """Return A times the expected score, [num_tokens], with the gradient of log pi at the ids of the head."""
        assert inputs.topk_logprobs is not None
        if tokens.logprobs.requires_grad and not inputs.topk_logprobs.requires_grad:
            raise ValueError(
                "topk_logprobs carries no gradient, so score_centering would subtract nothing. Fix: pass log pi at the "
                "ids of the head without detaching it."
            )
        residual = self._residuals(tokens)
        head = inputs.topk_logprobs[:, :-1].to(tokens.logprobs.dtype)
        acts = (keep & tokens.mask & (tokens.advantages != 0))[:, None] & (residual != 0) & head.isfinite()
        scores = (residual.to(head.dtype) * head.where(acts, 0.0)).where(acts, 0.0)
        return tokens.advantages * scores.sum(-1)

    def _residuals(self, tokens: Tokens) -> Tensor:
        """Return the residuals of the head's ids, float64 [num_tokens, K], 0 in unused slots, without gradient."""
        topk = tokens.topk_set
        assert topk.logprobs is not None
        used = topk.valid[:, :-1]
        pi = topk.logprobs.detach()[:, :-1].double().where(used, -math.inf).exp()
        mu = topk.rollout_logprobs[:, :-1].double().where(used, -math.inf).exp()
        # The head excludes the sampled token, so its mass belongs to the other ids.
        sampled_outside = tokens.logprobs.detach().double().exp().where(topk.valid[:, -1], 0.0)
        pi_other = (topk.masses()[0] + sampled_outside).clamp(min=_OTHER_FLOOR)
        mu_other = (1 - mu.sum(-1)).clamp(min=_OTHER_FLOOR)
        rho = mu_other / pi_other
        alpha = rho * self._weight(1 / rho)
        # An id with mu = 0 adds nothing to the expectation, whatever the ratio.
        weighted = (mu * self._weight(pi / mu)).where(mu > 0, 0.0)
        return (weighted - alpha[:, None] * pi).where(used, 0.0)

    def _weight(self, ratio: Tensor) -> Tensor:
        """Return f(r), in the shape of ``ratio``."""
        if self.centering == "none":
            return ratio.new_ones(ratio.shape)
        if self.centering == "truncate":
            return ratio.clamp(max=self.ratio_limits[1])
        low, high = self.mismatch_limits
        return ratio.where((ratio >= low) & (ratio <= high), 0.0)
