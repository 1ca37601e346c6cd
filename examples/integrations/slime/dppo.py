"""The losses of megatron_dppo as slime's custom loss; read in slime at 624b824a8 (2026-08-21).

    PYTHONPATH=examples/integrations/slime python train.py ... --loss-type custom_loss \
        --custom-loss-function-path dppo.loss --custom-config-path loss.yaml

with ``loss.yaml``, whose table takes every key of the ``[loss]`` section of megatron_dppo (this one is the default):

    megatron_dppo: {name: dppo_binary_tv}

slime's ``--entropy-coef``, ``--use-kl-loss``, ``--kl-loss-coef`` and ``--kl-loss-type`` keep their meaning. slime
records the rollout's log-probabilities, which DPPO is anchored on; ``--eps-clip`` has no part in it.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from slime.backends.megatron_utils.loss import get_log_probs_and_entropy, get_rollout_top_p_logprob_kwargs
from torch import Tensor

import megatron_dppo as md

_ESTIMATORS = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"}


def loss(
    args: Namespace, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a micro-batch of packed samples; ``logits`` of this rank's shard: ``[1, T, V]``.

    Raises:
        ValueError: If the batch has no rollout log-probabilities, or an option would be applied twice.
    """
    config = loss_config(args)
    if not batch.get("rollout_log_probs"):
        raise ValueError("batch has no rollout_log_probs, which DPPO is anchored on; let the rollout return them")
    _, statistics = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
        **get_rollout_top_p_logprob_kwargs(args, batch),
    )
    logprobs = torch.cat(statistics["log_probs"])
    weights = _weights(logprobs, sum_of_sample_mean)
    output = md.policy_loss(
        md.LossInputs(
            logprobs=logprobs,
            rollout_logprobs=torch.cat(batch["rollout_log_probs"]),
            advantages=torch.cat(batch["advantages"]),
            loss_mask=weights != 0,
            token_weights=weights,
            entropy=torch.cat(statistics["entropy"]) if config.entropy_coef else None,
            reference_logprobs=torch.cat(batch["ref_log_probs"]) if config.kl_coef else None,
        ),
        config,
    )
    total = output.loss_sum + 0 * logits.sum() if logprobs.numel() == 0 else output.loss_sum
    masked = ((weights != 0) & ~output.keep_mask).to(logprobs.dtype)
    return total, {"loss": total.detach().clone(), "mask_fraction": sum_of_sample_mean(masked).detach()}


def loss_config(args: Namespace) -> md.LossConfig:
    """Return the loss configuration for the arguments of slime."""
    if args.use_tis or args.use_opsm:
        raise ValueError("--use-tis and --use-opsm correct for the mismatch that this loss corrects for; remove them")
    table: dict[str, Any] = {"name": "dppo_binary_tv"} | dict(getattr(args, "megatron_dppo", {}))
    table["entropy_coef"] = float(args.entropy_coef)
    if args.use_kl_loss:
        if args.use_unbiased_kl or args.kl_loss_type not in _ESTIMATORS:
            raise ValueError(f"--kl-loss-type {args.kl_loss_type}: expected one of {list(_ESTIMATORS)}, not unbiased")
        table |= {"kl_coef": float(args.kl_loss_coef), "kl_estimator": _ESTIMATORS[args.kl_loss_type]}
    return md.LossConfig(**table)


def _weights(logprobs: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the factor of each token in slime's reduction, 0 outside its mask.

    The reduction is linear in the tokens, so the factors are its derivative.
    """
    with torch.enable_grad():
        tokens = torch.zeros_like(logprobs, requires_grad=True)
        total = sum_of_sample_mean(tokens)
        if not total.requires_grad:  # no token on this rank
            return torch.zeros_like(logprobs)
        return torch.autograd.grad(total, tokens)[0]
