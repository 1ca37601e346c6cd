"""Statistics of a vocabulary on the device against the CPU in float64, for fp32 and bf16 logits: log-probabilities,
entropy and their gradient, log-probabilities at given ids with the mass outside them, and the Top-K."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_dppo.head.vocab_topk import vocab_parallel_statistics, vocab_parallel_topk
from tests.gpu.checks import Result

TOKENS, VOCABULARY, PADDED = 256, 32003, 32064
TEMPERATURE = 0.7
K = 20


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
    """Values and gradient with a padded vocabulary, then everything at a set of ids."""
    generator = torch.Generator().manual_seed(0)
    exact = 4 * torch.randn(TOKENS, PADDED, generator=generator)
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator).to(device)
    weights = torch.randn(2, TOKENS, generator=generator).to(device)
    # For bf16 the gradient is stored in bf16: 8 bits of mantissa, 2^-9 relative rounding.
    for name, dtype, gradient_bound in (("fp32", torch.float32, 1e-5), ("bf16", torch.bfloat16, 3e-3)):
        logits = exact.to(device, dtype).requires_grad_()
        expected_logprobs, expected_entropy, expected_grad = reference(logits.detach(), labels, weights)
        logprobs, entropy, *_ = vocab_parallel_statistics(
            logits, labels, group=None, vocab_size=VOCABULARY, temperature=TEMPERATURE
        )
        (grad,) = torch.autograd.grad((weights[0] * logprobs + weights[1] * entropy).sum(), logits)
        yield Result(f"{name} log-probabilities, largest difference", _largest(logprobs, expected_logprobs), 2e-5)
        yield Result(f"{name} entropy, largest difference", _largest(entropy, expected_entropy), 2e-5)
        error = (grad.double().cpu() - expected_grad).norm() / expected_grad.norm()
        yield Result(f"{name} gradient", float(error), gradient_bound)
        yield Result(f"{name} gradient of padding", float(grad[:, VOCABULARY:].abs().max()), 0.0)
        yield from check_topk(name, logits.detach(), labels)


def check_topk(name: str, logits: Tensor, labels: Tensor) -> Iterator[Result]:
    """The policy's own Top-K, and the statistics at those ids and a label outside them; zeros have both signs."""
    logits = logits.clone()
    logits[0] = 0.0
    logits[0, ::2] = -0.0
    logits[1, 5:] = -torch.inf
    logp, probable = reference_topk(logits)
    shared = {"group": None, "vocab_size": VOCABULARY, "temperature": TEMPERATURE}
    logprobs, ids = vocab_parallel_topk(logits, K, **shared)
    yield Result(f"{name} Top-K, ids in another place", float((ids.cpu() != probable).sum()), 0.0)
    yield Result(f"{name} Top-K log-probabilities", _largest_of_finite(logprobs, logp.gather(1, probable)), 2e-5)
    labels = torch.where((ids == labels[:, None]).any(1), VOCABULARY - 1, labels)
    slots = torch.cat([ids, labels[:, None]], dim=1)
    valid = torch.ones_like(slots, dtype=torch.bool)
    valid[::3, 4] = False
    statistics = vocab_parallel_statistics(logits, labels, ids=slots, ids_valid=valid, **shared)
    assert statistics.id_logprobs is not None and statistics.other_logprob is not None
    expected = logp.gather(1, slots.cpu()).masked_fill(~valid.cpu(), -torch.inf)
    outside = logp.scatter(1, torch.where(valid, slots, VOCABULARY).cpu(), -torch.inf)[:, :VOCABULARY].logsumexp(1)
    yield Result(f"{name} log-probabilities at ids", _largest_of_finite(statistics.id_logprobs, expected), 2e-5)
    yield Result(f"{name} mass outside the ids", _largest_of_finite(statistics.other_logprob, outside), 2e-5)


def reference_topk(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities ``[T, PADDED]``, padding at -inf, and the K best ids, the lower id first among equal logits."""
    z = logits.double().cpu()[:, :VOCABULARY]
    logp = torch.nn.functional.pad((z / TEMPERATURE).log_softmax(-1), (0, PADDED - VOCABULARY), value=-torch.inf)
    return logp, z.argsort(dim=1, descending=True, stable=True)[:, :K]


def _largest(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().double().cpu() - expected).abs().max())


def _largest_of_finite(found: Tensor, expected: Tensor) -> float:
    """The largest difference; infinite unless both are -inf at the same places."""
    found = found.double().cpu()
    if not torch.equal(found == -torch.inf, expected == -torch.inf):
        return float("inf")
    return float(torch.where(expected == -torch.inf, 0.0, found - expected).abs().max())
