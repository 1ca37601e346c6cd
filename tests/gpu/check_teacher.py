"""The divergence from a teacher in the fused head on the device against float64 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.head.loss import dppo_head_loss
from megatron_dppo.head.teacher import TeacherTargets
from megatron_dppo.losses import no_policy_loss
from megatron_dppo.types import Divergence, TokenTargets
from tests.gpu.checks import Result

TOKENS, WIDTH, TEACHER_WIDTH, VOCABULARY, PADDED, TEMPERATURE = 200, 256, 384, 5003, 5056, 0.7
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 5e-3}


def check(device: torch.device) -> Iterator[Result]:
    """Each divergence in each type, in several chunks: its value and both gradients."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    hidden, weight = draw(TOKENS, WIDTH), 0.15 * draw(PADDED, WIDTH)
    teacher = draw(TOKENS, TEACHER_WIDTH), 0.1 * draw(PADDED, TEACHER_WIDTH)
    targets = TokenTargets(
        labels=torch.zeros(TOKENS, dtype=torch.int64, device=device),
        loss_mask=torch.ones(TOKENS, dtype=torch.bool, device=device),
        advantages=torch.zeros(TOKENS, device=device),
    )
    sizes: dict[str, Any] = {"group": None, "vocab_size": VOCABULARY, "temperature": TEMPERATURE, "chunk_tokens": 64}
    for dtype, bound in BOUNDS.items():
        for name in ("reverse_kl", "forward_kl"):
            rounded = [t.to(dtype) for t in (hidden, weight, *teacher)]
            leaves = [t.double().requires_grad_() for t in rounded[:2]]
            total = _plain(name, *leaves, *(t.double() for t in rounded[2:]))
            wanted = torch.autograd.grad(total, leaves)
            actual = [t.to(device).requires_grad_() for t in rounded[:2]]
            teacher_targets = TeacherTargets(rounded[2].to(device), rounded[3].to(device), Divergence(name))
            output = dppo_head_loss(*actual, targets, no_policy_loss, teacher=teacher_targets, **sizes)
            grads = torch.autograd.grad(output.loss_sum, actual)
            title = f"{name} {str(dtype).removeprefix('torch.')}"
            yield Result(f"{title} value", _error(output.loss_sum.detach(), total.detach()), 1e-5)
            for what, mine, expected in zip(("hidden states", "weight"), grads, wanted, strict=True):
                yield Result(f"{title} gradient of {what}", _error(mine, expected), bound)


def _plain(name: str, hidden: Tensor, weight: Tensor, other: Tensor, other_weight: Tensor) -> Tensor:
    log_p, log_q = (
        ((h @ w.T)[:, :VOCABULARY] / TEMPERATURE).log_softmax(1) for h, w in ((hidden, weight), (other, other_weight))
    )
    kl = {
        "reverse_kl": log_p.exp() * (log_p - log_q),
        "forward_kl": log_q.exp() * (log_q - log_p),
    }
    return kl[name].sum()


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.double().cpu() - expected).norm() / expected.norm())
