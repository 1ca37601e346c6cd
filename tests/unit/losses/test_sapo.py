"""SAPO against the derivative of its published objective."""

from __future__ import annotations

import torch

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.losses import policy_loss
from tests.unit.loss_inputs import make_inputs


def test_the_gradient_is_that_of_the_soft_gate() -> None:
    inputs, logprobs = make_inputs([0.9, 0.1, 0.5, 0.99], [0.3, 0.6, 0.5, 0.01], [1.0, 0.7, -2.0, -1.0])
    config = LossConfig(name="sapo", gate_temperature_low=3.0, gate_temperature_high=0.8)
    policy_loss(inputs, config).loss_sum.backward()
    log_pi = logprobs.detach().clone().requires_grad_()
    ratio = (log_pi - inputs.rollout_logprobs).exp()
    tau = torch.where(inputs.advantages > 0, 0.8, 3.0 * torch.ones_like(ratio)).detach()
    objective = -(inputs.advantages * 4 / tau * torch.sigmoid(tau * (ratio - 1))).sum()
    (expected,) = torch.autograd.grad(objective, log_pi)
    torch.testing.assert_close(logprobs.grad, expected, rtol=1e-9, atol=1e-12)


def test_a_ratio_without_bound_has_no_weight() -> None:
    inputs, logprobs = make_inputs([1.0], [1e-300], [1.0])
    policy_loss(inputs, LossConfig(name="sapo")).loss_sum.backward()
    assert logprobs.grad.tolist() == [0.0]
