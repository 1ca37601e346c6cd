"""Metrics of the losses: sums over the loss mask, each with its own denominator.

Counterfactual metrics are the decisions of other losses, with their defaults, on the same tokens.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.losses.decision import Decision
from megatron_dppo.losses.mismatch import decide
from megatron_dppo.losses.reduce import masked_max, masked_sum
from megatron_dppo.losses.rule import Loss, as_loss
from megatron_dppo.losses.tokens import Tokens
from megatron_dppo.types import LossInputs, Metric

_COMPARED: tuple[str, ...] = ("dppo_binary_tv", "dppo_binary_kl", "drpo", "ipo", "grpo", "cispo", "pg_is")
_ON_TOPK: tuple[str, ...] = ("dppo_topk_tv", "dppo_topk_kl")
_PREFIX = "counterfactual"


@torch.no_grad()
def policy_metrics(tokens: Tokens, decision: Decision, keep: Tensor, cap: float) -> dict[str, Metric]:
    """Return means over the loss mask, and the shares of masked tokens among those with a non-zero advantage."""
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


@torch.no_grad()
def counterfactual_metrics(
    tokens: Tokens,
    decision: Decision,
    keep: Tensor,
    config: LossConfig,
    token_weights: Tensor | None,
    *,
    factor: Tensor | None = None,
    coefficient: Tensor | None = None,
) -> dict[str, Metric]:
    """Return the share of tokens that each other loss would mask, and two sums for the cosine of ``with_cosines``.

    A gradient here is ``-A w M`` of each token, times its aggregation weight: that of the policy term by the
    log-probabilities, without penalty, bonus and centering. The other losses have their defaults, and the Top-K of
    ``config``. ``factor [T]`` is what the loss's terms were multiplied by beside its own weight, ``coefficient [T]``
    its gradient before the aggregation, where ``decision`` does not tell.
    """
    aggregation = torch.ones_like(tokens.advantages, dtype=torch.float64)
    if token_weights is not None:
        aggregation = torch.where(tokens.mask, token_weights.double(), 0.0)
    scale = tokens.advantages.double() * aggregation
    # ``acts`` counts in the mask fractions, as in ``policy_metrics``. ``moves`` also leaves out pi(a) = 0, where r
    # grad log pi is 0.
    acts = tokens.mask & (tokens.advantages != 0)
    moves = acts & (tokens.logprobs.detach() != -torch.inf)
    if coefficient is None:
        gradient = _coefficient(decision, keep & moves, config, scale)
        gradient = gradient if factor is None else gradient * factor.double()
    else:
        gradient = coefficient.double() * aggregation
    metrics, energy = {}, gradient.square().sum()
    for name in (*_COMPARED, *(_ON_TOPK if config.is_topk else ())):
        other = _defaults(name, config.topk, config.evicts_topk)
        alternative = decide(tokens, other)
        coefficient = _coefficient(alternative, alternative.keep & moves, other, scale)
        metrics[f"{_PREFIX}/{name}/mask_fraction"] = Metric((acts & ~alternative.keep).sum(), acts.sum())
        # With g the loss's own gradient and h the other's: <g, h> / |g|^2 and |h|^2 / |g|^2. Both are sums over
        # tokens, so they add up over micro-batches and ranks, which a cosine does not.
        metrics[f"{_PREFIX}/{name}/projection"] = Metric((gradient * coefficient).sum(), energy)
        metrics[f"{_PREFIX}/{name}/energy"] = Metric(coefficient.square().sum(), energy)
    return metrics


def with_cosines(metrics: Mapping[str, float]) -> dict[str, float]:
    """Replace two sums per loss by the cosine of its gradient and the loss's own; 1 means the same direction."""
    result = dict(metrics)
    for name in [name for name in result if name.startswith(_PREFIX) and name.endswith("/projection")]:
        stem = name.removesuffix("/projection")
        projection, energy = result.pop(name), result.pop(f"{stem}/energy")
        if energy > 0:
            # <g, h> / |g|^2 divided by |h| / |g|.
            result[f"{stem}/cosine"] = projection / energy**0.5
    return result


def _coefficient(decision: Decision, acts: Tensor, config: LossConfig, scale: Tensor) -> Tensor:
    floor, cap = config.ratio_limits
    if config.resolved_form == "ratio":  # a weight at its limit is a number, without gradient
        acts = acts & (decision.weight >= floor) & (decision.weight <= cap)
    return torch.where(acts, -scale * decision.weight.double().clamp(floor, cap), 0.0)


@cache
def _defaults(name: str, topk: int, eviction: bool) -> Loss:
    keys: dict[str, Any] = {"topk": topk, "topk_eviction": eviction} if name in _ON_TOPK else {}
    return as_loss(LossConfig(name=name, **keys))
