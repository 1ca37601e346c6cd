"""Losses and masks as a user would write them: doubles of built-in ones, and one that reads statistics of the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megatron_dppo.losses import BatchTokens, Decision, Loss, Tokens, needs, weigh_by_ratio
from megatron_dppo.types import LossInputs


@needs(topk=True, topk_gradient=True, zero_advantage=False)
def centered(inputs: LossInputs, *, cap: float) -> Tensor:
    """``score_centering`` with min(r, cap): the gradient of log pi at the ids of the head."""
    used = inputs.topk_valid[:, :-1]  # type: ignore[index]
    head = torch.where(used, inputs.topk_logprobs[:, :-1], 0.0)  # type: ignore[index]
    finite = used & head.isfinite()
    head = torch.where(finite, head, 0.0)
    p = torch.where(finite, head.detach().double().exp(), 0.0)
    m = torch.where(used, inputs.rollout_topk_logprobs[:, :-1].double().exp(), 0.0)  # type: ignore[index]
    sampled_outside = torch.where(inputs.topk_valid[:, -1], inputs.logprobs.detach().double().exp(), 0.0)  # type: ignore[index]
    p_rest = (inputs.topk_other_logprob.double().exp() + sampled_outside).clamp(min=1e-6)  # type: ignore[union-attr]
    m_rest = (1 - m.sum(-1)).clamp(min=1e-6)
    rho = m_rest / p_rest
    alpha = rho * (1 / rho).clamp(max=cap)
    residual = torch.where(m > 0, m * (p / m).clamp(max=cap), 0.0) - alpha[:, None] * p
    weight = (inputs.logprobs.detach() - inputs.rollout_logprobs).exp().clamp(max=cap)  # type: ignore[operator]
    scores = (torch.where(finite, residual, 0.0).to(head.dtype) * head).sum(-1)
    return -inputs.advantages * (weight * inputs.logprobs - scores)


@needs(sequences=True)
def ratio_mask(inputs: LossInputs, *, low: float, high: float) -> Tensor:
    """``mismatch = "mask_sequence"``: by the product of a sequence's ratios."""
    log_ratio = torch.where(inputs.loss_mask, inputs.logprobs - inputs.rollout_logprobs, 0.0)  # type: ignore[operator]
    ids = inputs.sequence_ids
    assert ids is not None
    product = log_ratio.new_zeros(int(ids.max()) + 1).index_add(0, ids, log_ratio).exp()
    return ((product >= low) & (product <= high))[ids]


def penalised(inputs: LossInputs, *, coefficient: float) -> Tensor:
    """PG-IS with the k3 penalty to the rollout, also where the advantage is 0."""
    back = inputs.rollout_logprobs - inputs.logprobs  # type: ignore[operator]
    ratio = (-back).detach().exp()
    return -inputs.advantages * ratio * inputs.logprobs + coefficient * (torch.expm1(back) - back)


class SelfNormalized(Loss):
    """The weight r over its mean in the update, without tokens beyond ``spreads`` times the spread of the step.

    No built-in loss reads these two numbers: this file is all that they need.
    """

    spreads: float = 1.5

    def step_statistics(self) -> Mapping[str, Callable[..., float]]:
        """Add the root mean square of log r."""
        return {**super().step_statistics(), "spread": root_mean_square}

    def update_statistics(self) -> Mapping[str, Callable[..., float]]:
        """Add the mean of r."""
        return {**super().update_statistics(), "mean_ratio": lambda tokens: tokens.log_ratio.exp().mean()}

    def decide(self, tokens: Tokens) -> Decision:
        """Keep the tokens within the spread."""
        distance = tokens.log_ratio.abs()
        decision = weigh_by_ratio(tokens, distance, distance <= self.spreads * tokens.statistic("spread"))
        return decision._replace(weight=decision.weight / tokens.statistic("mean_ratio"))


def root_mean_square(tokens: BatchTokens) -> float:
    """Return that of log r."""
    return float(tokens.log_ratio.square().mean().sqrt())
