"""The loss for other trainers: it refuses calls that would give a wrong number, and no error later.

The trainer of this package has its own guard, so it calls ``losses.policy_loss``, which checks none of this.
"""

from dataclasses import fields

import torch
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.losses import dppo as _dppo
from megatron_dppo.losses import objective as _objective
from megatron_dppo.types import LossInputs, LossOutput

_TOLERANCES = {torch.bfloat16: 0.25, torch.float16: 0.25}
"""Largest log-probability by dtype that rounding explains: a logit of 40 minus a logsumexp of 40."""
_TOLERANCE = 0.01
checked_on_device = set[str]()
"""Losses whose values were checked on a device with a queue, where a check waits for it."""


def policy_loss(inputs: LossInputs, config: LossConfig, *, counterfactuals: bool = False) -> LossOutput:
    """Check the call (``check_call``), then compute ``losses.policy_loss``."""
    check_call(inputs, config)
    return _objective.policy_loss(inputs, config, counterfactuals=counterfactuals)


def dppo_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """Check the call (``check_call``), then compute ``losses.dppo.dppo_loss``."""
    check_call(inputs, config)
    return _dppo.dppo_loss(inputs, config)


# The text and the example of the function that computes.
policy_loss.__doc__ = _objective.policy_loss.__doc__
dppo_loss.__doc__ = _dppo.dppo_loss.__doc__


def check_call(inputs: LossInputs, config: LossConfig) -> None:
    """Check types, gradient and values of a call. On a GPU values are checked in the first call of each loss alone.

    Raises:
        TypeError: A name in place of the configuration, or a list in place of a tensor.
        ValueError: Log-probabilities that are integers, detached, NaN or above 0, advantages that are not finite, or a
            mask that is not boolean.
    """
    if isinstance(config, str):
        raise TypeError(f"Expected a LossConfig, got the name {config!r}. Fix: pass LossConfig(name={config!r}).")
    if not isinstance(config, LossConfig) or not isinstance(inputs, LossInputs):
        names = f"({type(inputs).__name__}, {type(config).__name__})"
        raise TypeError(f"Expected (LossInputs, LossConfig), got {names}. Fix: build both, in this order.")
    for field in fields(inputs):
        value = getattr(inputs, field.name)
        if value is not None and field.name not in ("vocab_size", "statistics") and not isinstance(value, Tensor):
            kind = type(value).__name__
            raise TypeError(f"Expected a tensor as {field.name}, got a {kind}. Fix: torch.as_tensor({field.name}).")
    for name in ("logprobs", "rollout_logprobs"):
        column = getattr(inputs, name)
        if column is not None and not column.is_floating_point():
            raise ValueError(f"Expected log-probabilities as {name}, got {column.dtype}. Fix: pass floats, in nats.")
    if inputs.loss_mask.dtype != torch.bool:
        raise ValueError(f"Expected a boolean loss_mask, got {inputs.loss_mask.dtype}. Fix: loss_mask.bool().")
    if torch.is_grad_enabled() and not inputs.logprobs.requires_grad:
        raise ValueError(
            "Expected logprobs with a gradient, got a detached tensor, which trains nothing. Fix: pass log pi without "
            "detach(), or compute the value alone inside torch.no_grad()."
        )
    if inputs.logprobs.device.type != "cpu":
        if config.name in checked_on_device:
            return
        checked_on_device.add(config.name)
    check_values(inputs)


@torch.no_grad()
def check_values(inputs: LossInputs) -> None:
    """Check the values of tensors, which waits for their device."""
    mask = inputs.loss_mask
    columns = {"logprobs": inputs.logprobs, "rollout_logprobs": inputs.rollout_logprobs}
    if any(column is not None and column.shape != mask.shape for column in (*columns.values(), inputs.advantages)):
        return  # The loss names the field of another shape.
    for name, column in columns.items():
        if column is None:
            continue
        largest = torch.where(mask, column, -torch.inf).amax() if column.numel() else None
        if largest is not None and largest > _TOLERANCES.get(column.dtype, _TOLERANCE):
            raise ValueError(
                f"Expected log-probabilities as {name}, which are at most 0, got {float(largest):.4g}. Fix: take the "
                "logarithm of probabilities, or the negative of a negative log-likelihood."
            )
    if bool((mask & inputs.logprobs.isnan()).any()):
        raise ValueError(
            "Expected log-probabilities as logprobs, got NaN in the loss mask. Fix: look for it in the logits, or take "
            "its tokens out of loss_mask."
        )
    if bool((mask & ~inputs.advantages.isfinite()).any()):
        raise ValueError(
            "Expected finite advantages, got NaN or infinity in the loss mask. Fix: look for a reward that is not "
            "finite, or take its tokens out of loss_mask."
        )
