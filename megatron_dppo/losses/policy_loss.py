"""Every policy loss behind one function: a keep mask, a weight, and the same reinforce form.

    loss_t = -A_t * sg(min(r_t, C)) * M_t * log pi(a_t|s_t),        r_t = pi(a_t|s_t) / mu(a_t|s_t)

The mask M, the weight and the divergence carry no gradient. The gradient is that of arXiv 2602.04879, appendix on the
unified gradient; the *value* differs from the ratio form ``-A r M`` that other frameworks report, so compare
gradients, not curves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_dppo.config import LossConfig, LossName
from megatron_dppo.losses.divergence import binary_kl, binary_tv
from megatron_dppo.losses.reduce import masked_max, masked_sum, statistics_dtype
from megatron_dppo.losses.trust_region import divergence_keep_mask, ratio_keep_mask
from megatron_dppo.types import LossInputs, LossOutput, Metric

_MAX_LOG_RATIO = 80.0
"""exp(80) is still finite in fp32. As log pi <= 0, a larger log ratio needs log mu < -80, a token of probability 2e-35
that no engine samples: the clamp changes no real result, it only keeps a corrupt one finite and visible."""


@dataclass(frozen=True)
class _Tokens:
    """The inputs with everything outside the mask made harmless, and what follows from them; all ``[T]``."""

    mask: Tensor
    logprobs: Tensor
    """carries the gradient"""
    rollout_logprobs: Tensor
    advantages: Tensor
    log_ratio: Tensor
    ratio: Tensor
    divergence: Tensor


class _Rule(NamedTuple):
    """What distinguishes one loss from another."""

    divergence: Callable[[Tensor, Tensor], Tensor]
    """measured for the metrics, and for the mask where the loss has a trust region in it"""
    keep: Callable[[_Tokens, LossConfig], Tensor]


def _inside_divergence(tokens: _Tokens, config: LossConfig) -> Tensor:
    return divergence_keep_mask(tokens.divergence, tokens.log_ratio, tokens.advantages, *config.thresholds)


def _inside_ratio_clip(tokens: _Tokens, config: LossConfig) -> Tensor:
    return ratio_keep_mask(tokens.log_ratio, tokens.advantages, config.clip_ratio_low, config.clip_ratio_high)


def _everything(tokens: _Tokens, config: LossConfig) -> Tensor:
    return torch.ones_like(tokens.mask)


_RULES: Mapping[LossName, _Rule] = {
    "dppo_binary_tv": _Rule(binary_tv, _inside_divergence),
    "dppo_binary_kl": _Rule(binary_kl, _inside_divergence),
    "grpo": _Rule(binary_tv, _inside_ratio_clip),
    "pg_is": _Rule(binary_tv, _everything),
}


def dppo_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """A DPPO loss, for use inside another trainer; arguments, result and errors are those of ``policy_loss``.

    Raises:
        ValueError: also when ``config.name`` is not a ``dppo_*`` loss.
    """
    if not config.is_dppo:
        names = sorted(name for name in _RULES if name.startswith("dppo_"))
        raise ValueError(f"dppo_loss got the loss {config.name!r}, expected one of {names}; policy_loss takes any name")
    return policy_loss(inputs, config)


def policy_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """The loss that ``config.name`` says, summed over the tokens of the loss mask.

    ``dppo_binary_tv`` and ``dppo_binary_kl``: arXiv 2602.04879, equations 12 to 14. ``grpo``: ratio clipping with
    separate bounds, anchored on the rollout policy; its gradient is that of PPO's clip without dual clip. ``pg_is``:
    importance-weighted policy gradient without a trust region.

    Args:
        inputs: per-token tensors ``[T]``, log-probabilities in nats; values outside ``loss_mask`` may be anything, NaN
            and infinities included, and contribute exactly 0 to value and gradient.
        config: name, thresholds and cap.

    Returns:
        ``loss_sum`` (connected to ``inputs.logprobs`` even when no token is left), ``num_tokens`` (dropped tokens
        stay in it), ``keep_mask`` and metrics. Statistics are fp32, or float64 for float64 log-probabilities.

    Raises:
        ValueError: rollout log-probabilities are missing, shapes differ, or ``loss_mask`` is not bool.
    """
    tokens = _prepare(inputs, config)
    rule = _RULES[config.name]
    keep = rule.keep(tokens, config) & tokens.mask
    weight = tokens.ratio if config.ratio_cap is None else tokens.ratio.clamp(max=config.ratio_cap)
    # A weight of 0 (pi(a) = 0) would meet log pi = -inf; r log pi tends to 0 there, and so does its gradient.
    contributes = keep & (tokens.advantages != 0) & (weight != 0)
    # `where` on the inside too: a NaN behind a mask comes back in the gradient of a product.
    token_loss = -tokens.advantages * weight * torch.where(contributes, tokens.logprobs, 0.0)
    loss_sum = torch.where(contributes, token_loss, 0.0).sum()
    metrics = _metrics(tokens, keep, config.ratio_cap) | _common_metrics(inputs, loss_sum)
    return LossOutput(loss_sum=loss_sum, num_tokens=tokens.mask.sum(), keep_mask=keep, metrics=metrics)


def supervised_loss(inputs: LossInputs) -> LossOutput:
    """Negative log-likelihood of the labels, summed over the loss mask; for a supervised warm-up.

    Needs no rollout log-probabilities; advantages are ignored.

    Raises:
        ValueError: shapes differ, or ``loss_mask`` is not bool.
    """
    _check_shapes(inputs)
    loss_sum = -masked_sum(inputs.logprobs.to(statistics_dtype(inputs.logprobs)), inputs.loss_mask)
    return LossOutput(
        loss_sum=loss_sum,
        num_tokens=inputs.loss_mask.sum(),
        keep_mask=inputs.loss_mask,
        metrics=_common_metrics(inputs, loss_sum),
    )


def _prepare(inputs: LossInputs, config: LossConfig) -> _Tokens:
    if inputs.rollout_logprobs is None:
        raise ValueError(
            f"the loss {config.name!r} is anchored on the rollout policy's own log-probabilities, but "
            "rollout_logprobs is None; ask the rollout engine for them (log-probabilities recomputed by the trainer "
            "make a different algorithm, one that diverges)"
        )
    _check_shapes(inputs)
    mask = inputs.loss_mask
    dtype = statistics_dtype(inputs.logprobs, inputs.rollout_logprobs)
    logprobs = torch.where(mask, inputs.logprobs.to(dtype), 0.0)
    rollout_logprobs = torch.where(mask, inputs.rollout_logprobs.detach().to(dtype), 0.0)
    log_ratio = (logprobs.detach() - rollout_logprobs).clamp(max=_MAX_LOG_RATIO)
    return _Tokens(
        mask=mask,
        logprobs=logprobs,
        rollout_logprobs=rollout_logprobs,
        advantages=torch.where(mask, inputs.advantages.detach().to(dtype), 0.0),
        log_ratio=log_ratio,
        ratio=log_ratio.exp(),
        divergence=_RULES[config.name].divergence(logprobs, rollout_logprobs),
    )


def _check_shapes(inputs: LossInputs) -> None:
    expected = inputs.logprobs.shape
    for name in ("rollout_logprobs", "advantages", "loss_mask", "entropy"):
        value = getattr(inputs, name)
        if value is not None and value.shape != expected:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, expected that of logprobs, {tuple(expected)}")
    if inputs.loss_mask.dtype != torch.bool:
        raise ValueError(f"loss_mask must be bool, got {inputs.loss_mask.dtype}; pass mask.bool()")


@torch.no_grad()
def _metrics(tokens: _Tokens, keep: Tensor, ratio_cap: float | None) -> dict[str, Metric]:
    """Means over the loss mask; fractions of dropped tokens over those with a non-zero advantage."""
    count = tokens.mask.sum()
    rise = tokens.logprobs.exp() - tokens.rollout_logprobs.exp()
    up, down = tokens.advantages > 0, tokens.advantages < 0

    def mean(values: Tensor) -> Metric:
        return Metric(masked_sum(values, tokens.mask), count)

    def largest(values: Tensor) -> Metric:
        return Metric(masked_max(values, tokens.mask), kind="max")

    def dropped(among: Tensor) -> Metric:
        return Metric((among & ~keep).sum(), among.sum())

    cap = float("inf") if ratio_cap is None else ratio_cap
    return {
        "mask_fraction": dropped(up | down),
        "mask_fraction_positive": dropped(up),
        "mask_fraction_negative": dropped(down),
        "divergence": mean(tokens.divergence),
        "divergence_max": largest(tokens.divergence),
        "abs_prob_diff": mean(rise.abs()),
        "prob_rise_max": largest(rise),
        "prob_drop_max": largest(-rise),
        "ratio": mean(tokens.ratio),
        "ratio_max": largest(tokens.ratio),
        "ratio_capped_fraction": mean((tokens.ratio > cap).to(tokens.ratio.dtype)),
        # r - 1 - log r, the estimator "k3" of KL(mu || pi); expm1 because r is close to 1.
        "kl_k3": mean(tokens.log_ratio.expm1() - tokens.log_ratio),
    }


@torch.no_grad()
def _common_metrics(inputs: LossInputs, loss_sum: Tensor) -> dict[str, Metric]:
    count = inputs.loss_mask.sum()
    metrics = {"loss": Metric(loss_sum.detach(), count)}
    if inputs.entropy is not None:
        metrics["entropy"] = Metric(masked_sum(inputs.entropy.detach(), inputs.loss_mask), count)
    return metrics
