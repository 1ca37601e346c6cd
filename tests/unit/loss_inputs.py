"""Small inputs for the tests of the losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_dppo.types import LossInputs, LossOutput

NAMES = ("dppo_binary_tv", "dppo_binary_kl", "grpo", "pg_is")


def make_inputs(
    pi: list[float], mu: list[float], advantages: list[float], mask: list[bool] | None = None, **more: Any
) -> tuple[LossInputs, Tensor]:
    """Inputs from probabilities, and their leaf ``logprobs``."""
    logprobs = torch.tensor(pi, dtype=torch.float64).log().requires_grad_()
    inputs = LossInputs(
        logprobs=logprobs,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        loss_mask=torch.tensor([True] * len(pi) if mask is None else mask),
        rollout_logprobs=torch.tensor(mu, dtype=torch.float64).log(),
        **more,
    )
    return inputs, logprobs


def value(output: LossOutput, name: str) -> float:
    """A metric of a single micro-batch."""
    metric = output.metrics[name]
    return float(metric.numerator) / float(metric.denominator)
