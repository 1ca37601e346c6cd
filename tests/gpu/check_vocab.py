"""Log-probabilities and entropy on the device against the CPU in float64, for fp32 and bf16 logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_dppo.parallel import vocab_parallel_logprobs_and_entropy
from tests.gpu.checks import Result

TOKENS, VOCABULARY, PADDED = 256, 32003, 32064
TEMPERATURE = 0.7


def reference(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropy and the gradient of a weighted sum of both, by torch's softmax in float64."""
    leaf = logits.double().cpu().requires_grad_()
    logp = (leaf[:, :VOCABULARY] / TEMPERATURE).log_softmax(-1)
    logprobs = logp.gather(1, labels.cpu()[:, None]).squeeze(1)
    entropy = -(logp.exp() * logp).sum(-1)
    w = weights.double().cpu()
    (grad,) = torch.autograd.grad((w[0] * logprobs + w[1] * entropy).sum(), leaf)
    return logprobs.detach(), entropy.detach(), grad


def check(device: torch.device) -> Iterator[Result]:
    """Values and gradient with a padded vocabulary."""
    generator = torch.Generator().manual_seed(0)
    exact = 4 * torch.randn(TOKENS, PADDED, generator=generator)
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator).to(device)
    weights = torch.randn(2, TOKENS, generator=generator).to(device)
    # For bf16 the gradient is stored in bf16: 8 bits of mantissa, 2^-9 relative rounding.
    for name, dtype, gradient_bound in (("fp32", torch.float32, 1e-5), ("bf16", torch.bfloat16, 3e-3)):
        logits = exact.to(device, dtype).requires_grad_()
        expected_logprobs, expected_entropy, expected_grad = reference(logits.detach(), labels, weights)
        logprobs, entropy = vocab_parallel_logprobs_and_entropy(
            logits, labels, group=None, vocab_size=VOCABULARY, temperature=TEMPERATURE
        )
        (grad,) = torch.autograd.grad((weights[0] * logprobs + weights[1] * entropy).sum(), logits)
        yield Result(f"{name} log-probabilities, largest difference", _largest(logprobs, expected_logprobs), 2e-5)
        yield Result(f"{name} entropy, largest difference", _largest(entropy, expected_entropy), 2e-5)
        error = (grad.double().cpu() - expected_grad).norm() / expected_grad.norm()
        yield Result(f"{name} gradient", float(error), gradient_bound)
        yield Result(f"{name} gradient of padding", float(grad[:, VOCABULARY:].abs().max()), 0.0)


def _largest(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().double().cpu() - expected).abs().max())
