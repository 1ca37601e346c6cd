"""Every loss, both directions, on the device in fp32 against the CPU in float64: value, gradient, keep mask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.config.loss_registry import loss_names
from megatron_dppo.losses import policy_loss
from megatron_dppo.types import LossInputs, LossOutput
from tests.gpu.checks import Result
from tests.unit.loss_inputs import topk_fields

TOKENS, VOCABULARY, TOPK, SEQUENCE = 4096, 64, 20, 64


def random_inputs() -> LossInputs:
    """Two policies at a moderate distance, every field of every loss, a mask with NaN outside it."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rollout = (3 * normal(TOKENS, VOCABULARY)).log_softmax(-1)
    policy = (rollout + 0.5 * normal(TOKENS, VOCABULARY)).log_softmax(-1)
    sampled = torch.multinomial(rollout.exp(), 1, generator=generator).squeeze(1)
    rows = torch.arange(TOKENS)
    mask = torch.rand(TOKENS, generator=generator) < 0.8
    return LossInputs(
        logprobs=policy[rows, sampled],
        rollout_logprobs=rollout[rows, sampled],
        recomputed_logprobs=rollout[rows, sampled] + 0.01 * normal(TOKENS),
        advantages=torch.where(mask, normal(TOKENS), torch.nan),
        loss_mask=mask,
        sequence_ids=rows // SEQUENCE,
        token_weights=torch.ones(TOKENS, dtype=torch.float64),
        statistics={"largest_square": 0.2},
        **topk_fields(policy.exp(), rollout.exp(), sampled, TOPK),
    )


def on(inputs: LossInputs, device: torch.device, dtype: torch.dtype) -> LossInputs:
    """The same inputs on a device in a dtype, with fresh leaves for the gradient."""
    moved: dict[str, Any] = {"statistics": inputs.statistics}
    for field in fields(inputs):
        value = getattr(inputs, field.name)
        if isinstance(value, Tensor):
            moved[field.name] = value.to(device, dtype) if value.is_floating_point() else value.to(device)
    for name in ("logprobs", "topk_logprobs"):
        moved[name] = moved[name].detach().requires_grad_()
    return LossInputs(**moved)


def gradient(inputs: LossInputs, config: LossConfig) -> tuple[LossOutput, Tensor]:
    """The loss and its gradient by the log-probabilities of the labels and, by those, of the Top-K ids."""
    output = policy_loss(inputs, config)
    assert inputs.topk_logprobs is not None
    leaves = (inputs.logprobs, inputs.topk_logprobs)
    gradients = torch.autograd.grad(output.loss_sum, leaves, allow_unused=not config.needs.topk_gradient)
    return output, torch.cat([grad.flatten() for grad in gradients if grad is not None])


def check(device: torch.device) -> Iterator[Result]:
    """All losses."""
    inputs = random_inputs()
    configs = {name: LossConfig(name=name) for name in loss_names()}
    configs["trm"] = LossConfig(name="trm", sequence_max=1.0, sequence_mean=0.13)  # the defaults would keep nothing
    predictive = [LossConfig(name=name, direction="predictive") for name in ("dppo_topk_tv", "dppo_topk_kl")]
    for name, config in (configs | {f"{c.name} predictive": c for c in predictive}).items():
        expected, expected_grad = gradient(on(inputs, torch.device("cpu"), torch.float64), config)
        actual, found_grad = gradient(on(inputs, device, torch.float32), config)
        scale = float(expected_grad.norm())
        yield Result(f"{name} gradient", float((found_grad.cpu().double() - expected_grad).norm()) / scale, 1e-5)
        value_error = abs(float(actual.loss_sum) - float(expected.loss_sum)) / abs(float(expected.loss_sum))
        yield Result(f"{name} value", value_error, 1e-4)
        flips = (actual.keep_mask.cpu() != expected.keep_mask).double().mean()
        yield Result(f"{name} keep mask, share of tokens that differ", float(flips), 1e-3)
