"""The losses of megatron_dppo as policy losses of verl; read in verl 0.9.1.

    VERL_USE_EXTERNAL_MODULES=dppo PYTHONPATH=examples/integrations/verl python -m verl.trainer.main_ppo ... \
        actor_rollout_ref.actor.policy_loss.loss_mode=megatron_dppo/dppo_binary_tv \
        actor_rollout_ref.actor.clip_ratio_low=0.15 actor_rollout_ref.actor.clip_ratio_high=0.15 \
        actor_rollout_ref.rollout.calculate_log_probs=True algorithm.rollout_correction.bypass_mode=True

Bypass mode makes verl's ``old_log_probs`` those of the rollout engine, which DPPO is anchored on; without it the anchor
is recomputed by the trainer, which is another algorithm (``dppo_recompute_*`` here). A policy loss of verl does not see
these keys. So this one warns if the first anchor equals the policy's own log-probabilities, as an engine's hardly does.
As in verl's own ``dppo_tv``, ``clip_ratio_low`` and ``_high`` are the thresholds of the divergence and ``clip_ratio_c``
is the cap of the ratio.
"""

from __future__ import annotations

import warnings
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss

import megatron_dppo as md

_OWN = 1e-7
"""Largest difference of log-probabilities that one model has at the same weights."""


def policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    *,
    name: str,
) -> tuple[Tensor, dict[str, Any]]:
    """Compute the loss as a ``PolicyLossFn`` of verl; tensors are ``[batch, response]``.

    Raises:
        ValueError: If ``rollout_is_weights`` is given: the loss itself corrects for that mismatch.
    """
    if rollout_is_weights is not None:
        raise ValueError(
            f"loss_mode = megatron_dppo/{name} with importance weights of the rollout: pi / mu would count twice. Set "
            "algorithm.rollout_correction.rollout_is=null"
        )
    loss = md.LossConfig(
        name=name,
        divergence_threshold_low=float(config.clip_ratio_low),
        divergence_threshold_high=float(config.clip_ratio_high),
        ratio_cap=float(config.clip_ratio_c),
    )
    mask = response_mask.bool().flatten()
    _check_anchor((log_prob.detach() - old_log_prob).flatten()[mask])
    output = md.dppo_loss(
        md.LossInputs(
            logprobs=log_prob.flatten(),
            rollout_logprobs=old_log_prob.flatten(),
            advantages=advantages.flatten(),
            loss_mask=mask,
            token_weights=_weights(response_mask.to(log_prob.dtype), loss_agg_mode, config.global_batch_info).flatten(),
        ),
        loss,
    )
    masked = (mask & ~output.keep_mask).sum() / mask.sum().clamp(min=1)
    return output.loss_sum, {"actor/pg_clipfrac": masked.item()}


_calls = count()


def _check_anchor(log_ratio: Tensor) -> None:
    """Warn if the first micro-batch has no mismatch at all. Later ones may follow an update, which changes pi."""
    if next(_calls) or log_ratio.numel() < 2 or float(log_ratio.abs().max()) > _OWN:
        return
    warnings.warn(
        "old_log_probs of the first update equal the policy's own: the trainer recomputed them, and the mask sees no "
        "mismatch with the engine. Set algorithm.rollout_correction.bypass_mode=True and "
        "actor_rollout_ref.rollout.calculate_log_probs=True. Only a batch-invariant engine may have equal ones",
        stacklevel=2,
    )


def _weights(mask: Tensor, mode: str, batch: Any) -> Tensor:
    """Return the factor of each token in verl's aggregation: the aggregation is linear, so this is its derivative."""
    with torch.enable_grad():
        tokens = torch.zeros_like(mask, requires_grad=True)
        total = agg_loss(loss_mat=tokens, loss_mask=mask, loss_agg_mode=mode, **batch)
        return torch.autograd.grad(total, tokens)[0]


for _name in ("dppo_binary_tv", "dppo_binary_kl"):
    register_policy_loss(f"megatron_dppo/{_name}")(partial(policy_loss, name=_name))
