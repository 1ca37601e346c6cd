"""Metrics of the losses: sums over the loss mask, each with its own denominator."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dppo.losses.parts.decision import Decision
from megatron_dppo.losses.parts.reduce import masked_max, masked_sum
from megatron_dppo.losses.parts.tokens import Tokens
from megatron_dppo.types import LossInputs, Metric


@torch.no_grad()
def policy_metrics(tokens: Tokens, decision: Decision, keep: Tensor, cap: float) -> dict[str, Metric]:
    """Return means over the loss mask, and the shares of masked tokens among those with a non-zero advantage.

    Args:
        tokens: The prepared inputs.
        decision: Decision of the loss; its weight is the reported ratio.
        keep: ``[T]`` bool, the final mask.
        cap: C; infinity = none.
    """
    count = tokens.mask.sum()
    # pi - mu of the sampled token, with its sign.
    rise = tokens.logprobs.exp() - tokens.rollout_logprobs.exp()
    up, down = tokens.advantages > 0, tokens.advantages < 0

    def mean(values: Tensor) -> Metric:
        return Metric(masked_sum(values, tokens.mask), count)

    def largest(values: Tensor) -> Metric:
        return Metric(masked_max(values, tokens.mask), kind="max")

    def masked_fraction(among: Tensor) -> Metric:
        # Tokens with advantage 0 are never masked. In the denominator they would hide the share of masked updates.
        return Metric((among & ~keep).sum(), among.sum())

    ratio = tokens.log_ratio.exp()
    metrics = {
        "mask_fraction": masked_fraction(up | down),
        "mask_fraction_positive": masked_fraction(up),
        "mask_fraction_negative": masked_fraction(down),
        "divergence": mean(decision.divergence),
        "divergence_max": largest(decision.divergence),
        "abs_prob_diff": mean(rise.abs()),
        "prob_rise_max": largest(rise),
        "prob_drop_max": largest(-rise),
        "ratio": mean(ratio),
        "ratio_max": largest(ratio),
        "ratio_capped_fraction": mean((decision.weight > cap).to(ratio.dtype)),
        # r - 1 - log r, the estimator "k3" of KL(mu || pi); expm1 because r is close to 1.
        "kl_k3": mean(tokens.log_ratio.expm1() - tokens.log_ratio),
    }
    if tokens.recomputed_logprobs is not None:
        # The mismatch of trainer and engine at the same weights, apart from what the update did.
        metrics["recomputed_abs_prob_diff"] = mean((tokens.recomputed.exp() - tokens.rollout_logprobs.exp()).abs())
    return metrics | _topk_metrics(tokens)


def _topk_metrics(tokens: Tokens) -> dict[str, Metric]:
    if tokens.topk is None:
        return {}
    topk, count = tokens.topk, tokens.mask.sum()
    p_other, m_other = topk.masses()
    return {
        "topk_other": Metric(masked_sum(p_other, tokens.mask), count),
        "topk_other_rollout": Metric(masked_sum(m_other, tokens.mask), count),
        # Slot K is valid exactly where the sampled token is outside the rollout's Top-K.
        "topk_sampled_outside": Metric(topk.valid[:, -1].sum(), count),
    }


@torch.no_grad()
def common_metrics(inputs: LossInputs, loss_sum: Tensor) -> dict[str, Metric]:
    """Return the aggregated loss, and the entropy if it is given."""
    count = inputs.loss_mask.sum()
    metrics = {"loss": Metric(loss_sum.detach(), count)}
    if inputs.entropy is not None:
        metrics["entropy"] = Metric(masked_sum(inputs.entropy.detach(), inputs.loss_mask), count)
    return metrics
