"""What distinguishes one loss from another: which tokens it keeps, and the weight of those. True = keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.losses.centering import centering_weight
from megatron_dppo.losses.divergence import binary_kl, binary_tv
from megatron_dppo.losses.reduce import per_sequence
from megatron_dppo.losses.sequences import prefix_keep_mask, sequence_keep_mask
from megatron_dppo.losses.tokens import Tokens
from megatron_dppo.losses.trust_region import divergence_keep_mask, mismatch_keep_mask, ratio_keep_mask


class Decision(NamedTuple):
    """What a loss decides for each token; all ``[T]``, without gradient."""

    keep: Tensor
    """bool; may also be True outside the loss mask"""
    weight: Tensor
    """the factor of the advantage, before ratio_cap and ratio_floor"""
    clipped_weight: Tensor
    """what a dropped token reports in its place: 0, or the clipped ratio of a surrogate"""
    divergence: Tensor


_Divergence = Callable[[Tokens], Tensor]
_Rule = Callable[[Tokens, LossConfig, Tensor], Decision]


def decide(tokens: Tokens, config: LossConfig) -> Decision:
    """Mask and weight of every token under ``config``, the mismatch mask included."""
    measure, rule = _RULES.get(config.name, _OWN)
    decision = rule(tokens, config, measure(tokens))
    if config.mismatch not in ("none", "truncate"):
        inside = mismatch_keep_mask(
            _mismatch_log_ratio(tokens, config),
            tokens.mask,
            cast(Literal["token", "sequence", "geometric"], config.mismatch.removeprefix("mask_")),
            config.mismatch_limits,
            tokens.sequence_ids,
        )
        clipped = torch.where(inside, decision.clipped_weight, 0.0)
        decision = decision._replace(keep=decision.keep & inside, clipped_weight=clipped)
    return decision


def _mismatch_log_ratio(tokens: Tokens, config: LossConfig) -> Tensor:
    """Trainer against engine at the same weights where the loss has the anchor, else pi against mu."""
    return tokens.anchor - tokens.rollout_logprobs if config.mismatch_by_anchor else tokens.log_ratio


def _binary_tv(tokens: Tokens) -> Tensor:
    return binary_tv(tokens.logprobs, tokens.rollout_logprobs)


def _binary_kl(tokens: Tokens) -> Tensor:
    return binary_kl(tokens.logprobs, tokens.rollout_logprobs)


def _recompute_tv(tokens: Tokens) -> Tensor:
    return binary_tv(tokens.logprobs, tokens.anchor)


def _recompute_kl(tokens: Tokens) -> Tensor:
    return binary_kl(tokens.logprobs, tokens.anchor)


def _topk_tv(tokens: Tokens) -> Tensor:
    return _on_topk("tv", tokens)


def _topk_kl(tokens: Tokens) -> Tensor:
    return _on_topk("kl", tokens)


def _on_topk(kind: Literal["tv", "kl"], tokens: Tokens) -> Tensor:
    assert tokens.topk is not None
    return tokens.topk.divergence(kind).to(tokens.log_ratio.dtype)


def _plain(tokens: Tokens, keep: Tensor, divergence: Tensor) -> Decision:
    weight = tokens.log_ratio.exp()
    return Decision(keep, weight, torch.zeros_like(weight), divergence)


def _divergence_region(tokens: Tokens, config: LossConfig, divergence: Tensor) -> Decision:
    direction = tokens.log_ratio
    if config.direction == "predictive":
        assert tokens.topk is not None
        kind: Literal["tv", "kl"] = "tv" if config.name.endswith("_tv") else "kl"
        rate = tokens.topk.rate(kind, config.tail, tokens.logprobs, tokens.rollout_logprobs)
        # A NaN leads nowhere, and nothing would be dropped.
        direction = torch.where(rate.isnan(), direction, rate)
    keep = divergence_keep_mask(divergence, direction, tokens.advantages, *config.thresholds)
    return _plain(tokens, keep, divergence)


def _recompute_region(tokens: Tokens, config: LossConfig, divergence: Tensor) -> Decision:
    keep = divergence_keep_mask(divergence, tokens.anchor_log_ratio, tokens.advantages, *config.thresholds)
    return _plain(tokens, keep, divergence)


def _drpo(tokens: Tokens, config: LossConfig, divergence: Tensor) -> Decision:
    """The gradient of ``-A r + abs(A) mu (r - 1)^2 / (2 delta)`` (arXiv 2606.09821): nothing is dropped."""
    low, high = config.thresholds
    moved = tokens.logprobs.detach().exp() - tokens.rollout_logprobs.exp()
    outward = torch.where(tokens.advantages > 0, moved / high, -moved / low)
    ratio = tokens.log_ratio.exp()
    return Decision(torch.ones_like(tokens.mask), ratio * (1 - outward), torch.zeros_like(ratio), divergence)


def _ipo(tokens: Tokens, config: LossConfig, divergence: Tensor) -> Decision:
    """The mask of prime-rl's IPO: both ways of a move are dropped, whatever the sign of the advantage."""
    low, high = config.thresholds
    return _plain(tokens, torch.where(tokens.log_ratio > 0, divergence <= high, divergence <= low), divergence)


def _trm(tokens: Tokens, config: LossConfig, divergence: Tensor) -> Decision:
    """Whole sequences are dropped (arXiv 2512.23075)."""
    assert tokens.sequence_ids is not None
    ratio = tokens.log_ratio
    if config.resolved_divergence == "sampled":
        peak, average = ratio.square() / 2, ratio.expm1() - ratio
    else:
        peak = average = _binary_kl(tokens) if config.resolved_divergence == "binary" else _topk_kl(tokens)
    limits = [math.inf if limit == "off" else limit for limit in (config.sequence_max, config.sequence_mean)]
    return _plain(tokens, sequence_keep_mask(peak, average, tokens.mask, tokens.sequence_ids, *limits), average)


def _cppo(tokens: Tokens, config: LossConfig, divergence: Tensor) -> Decision:
    """DPPO with weights by position and a budget for prefixes (arXiv 2606.10968)."""
    assert tokens.sequence_ids is not None
    if config.resolved_divergence == "topk":
        divergence = _topk_tv(tokens)
    keep = prefix_keep_mask(
        divergence,
        tokens.log_ratio,
        tokens.advantages,
        tokens.mask,
        tokens.sequence_ids,
        thresholds=config.thresholds,
        floor=config.position_floor,
        budget=config.prefix_budgets,
    )
    return _plain(tokens, keep, divergence)


def _ratio_region(tokens: Tokens, config: LossConfig, divergence: Tensor) -> Decision:
    return _plain(tokens, ratio_keep_mask(tokens.log_ratio, tokens.advantages, *config.clip_ratios), divergence)


def _minirl(tokens: Tokens, config: LossConfig, divergence: Tensor) -> Decision:
    keep = ratio_keep_mask(tokens.anchor_log_ratio, tokens.advantages, *config.clip_ratios)
    return _plain(tokens, keep, divergence)


def _score_centering(tokens: Tokens, config: LossConfig, divergence: Tensor) -> Decision:
    decision = _plain(tokens, torch.ones_like(tokens.mask), divergence)
    return decision._replace(weight=centering_weight(decision.weight, config))


def _everything(tokens: Tokens, config: LossConfig, divergence: Tensor) -> Decision:
    return _plain(tokens, torch.ones_like(tokens.mask), divergence)


def _ppo_clip(tokens: Tokens, config: LossConfig, divergence: Tensor) -> Decision:
    return _surrogate(tokens.log_ratio, tokens, config, divergence)


def _ppo_decoupled(tokens: Tokens, config: LossConfig, divergence: Tensor) -> Decision:
    mismatch = _mismatch_log_ratio(tokens, config).exp()
    if config.mismatch == "truncate":
        mismatch = mismatch.clamp(*config.mismatch_limits)
    decision = _surrogate(tokens.anchor_log_ratio, tokens, config, divergence)
    return decision._replace(weight=decision.weight * mismatch, clipped_weight=decision.clipped_weight * mismatch)


def _gspo(tokens: Tokens, config: LossConfig, divergence: Tensor) -> Decision:
    assert tokens.sequence_ids is not None
    log_ratio = per_sequence(tokens.log_ratio, tokens.mask, tokens.sequence_ids, "mean")
    return _surrogate(log_ratio, tokens, config, divergence)


def _surrogate(log_ratio: Tensor, tokens: Tokens, config: LossConfig, divergence: Tensor) -> Decision:
    """``max(-A r, -A clip(r))``, and at most ``-A c`` for A < 0 with dual clip (arXiv 1707.06347, 1912.09729)."""
    low, high = config.clip_ratios
    ratio, advantages = log_ratio.exp(), tokens.advantages
    keep, clipped = ratio_keep_mask(log_ratio, advantages, low, high), ratio.clamp(1 - low, 1 + high)
    if config.dual_clip is not None:
        beyond = (advantages < 0) & (ratio > config.dual_clip)
        keep, clipped = keep & ~beyond, torch.where(beyond, config.dual_clip, clipped)
    return Decision(keep, ratio, clipped, divergence)


_RULES: Mapping[str, tuple[_Divergence, _Rule]] = {
    "dppo_binary_tv": (_binary_tv, _divergence_region),
    "dppo_binary_kl": (_binary_kl, _divergence_region),
    "dppo_topk_tv": (_topk_tv, _divergence_region),
    "dppo_topk_kl": (_topk_kl, _divergence_region),
    "dppo_recompute_binary_tv": (_recompute_tv, _recompute_region),
    "dppo_recompute_binary_kl": (_recompute_kl, _recompute_region),
    "drpo": (_binary_tv, _drpo),
    "ipo": (_binary_tv, _ipo),
    "grpo": (_binary_tv, _ratio_region),
    "minirl": (_binary_tv, _minirl),
    "pg_is": (_binary_tv, _everything),
    "cispo": (_binary_tv, _everything),
    "score_centering": (_binary_tv, _score_centering),
    "trm": (_binary_tv, _trm),
    "cppo": (_binary_tv, _cppo),
    "gspo": (_binary_tv, _gspo),
    "ppo_clip": (_binary_tv, _ppo_clip),
    "ppo_decoupled": (_binary_tv, _ppo_decoupled),
}
"""Loss -> its divergence (measured for the metrics, and for the mask where that has one in it) and its rule."""

_OWN: tuple[_Divergence, _Rule] = (_binary_tv, _everything)
"""A user's loss, which decides by itself."""
