"""Liger-Kernel ead96b6, ``ops/fused_linear_scaled_cross_entropy.py``: what runs where the Hopper kernel cannot.

Chunks of 512 tokens; logits and their division by the temperature in the dtype of the model, then fp32 tensors for
softmax, log-sum-exp, the product of the entropy and log-softmax. Backward recomputes the logits and sums the gradient
of the weight over the chunks in the dtype of the model. No ids. The tensor-parallel form has two all-reduces a chunk
(the largest logit; then the sums and the label's logit together).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from head_peers.shards import local, picked, reduced
from head_peers.task import Statistics, Task

CHUNK_TOKENS = 512


def liger_fallback(task: Task) -> Statistics:
    """Compute log-probabilities and entropy, both with gradient."""
    weight, labels = task.weight, task.targets.labels
    logprobs, entropy = _FusedLinear.apply(
        task.hidden, weight, labels, task.temperature, task.first, task.group, task.entropy_gradient
    )
    return Statistics(logprobs, entropy)


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    return ((hidden @ weight.t()) / temperature).float()


def _forward(logits: Tensor, labels: Tensor, first: int, group: ProcessGroup | None) -> tuple[Tensor, ...]:
    """Return log-probability, entropy and log-sum-exp."""
    if group is None:
        probs = logits.softmax(1)
        log_total = logits.logsumexp(1)
        entropy = log_total - (probs * logits).sum(1)
        return logits.log_softmax(1).gather(1, labels[:, None]).squeeze(1), entropy, log_total
    largest = reduced(logits.amax(1), group, largest=True)
    exp = (logits - largest[:, None]).exp()
    sums = torch.stack([exp.sum(1), (exp * logits).sum(1), picked(logits, labels, first)])
    total, weighted, at_label = reduced(sums, group)
    log_total = largest + total.log()
    return at_label - log_total, log_total - weighted / total, log_total


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        first: int,
        group: ProcessGroup | None,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        parts = [
            _forward(_logits(h, weight, temperature), at, first, group)
            for h, at in zip(hidden.split(CHUNK_TOKENS), labels.split(CHUNK_TOKENS), strict=True)
        ]
        logprobs, entropy, log_total = (torch.cat(column) for column in zip(*parts, strict=True))
        saved = () if group is None else (log_total, entropy)
        ctx.save_for_backward(hidden, weight, *local(labels, first, len(weight)), *saved)
        ctx.temperature, ctx.entropy_gradient = temperature, entropy_gradient
        entropy = entropy.to(hidden.dtype)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, is_local, local_ids, *saved = ctx.saved_tensors
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for start in range(0, len(hidden), CHUNK_TOKENS):
            rows = slice(start, start + CHUNK_TOKENS)
            slopes = (grad[rows, None], grad_entropy[rows, None].float() if ctx.entropy_gradient else None)
            logits = _logits(hidden[rows], weight, ctx.temperature)
            out = _logit_gradient(
                logits, is_local[rows, None], local_ids[rows, None], slopes, [k[rows, None] for k in saved]
            )
            out = out.to(hidden.dtype) / ctx.temperature
            del logits
            grad_hidden[rows].add_(out @ weight)
            grad_weight.add_(out.t() @ hidden[rows])
            del out
        return grad_hidden, grad_weight, None, None, None, None, None


def _logit_gradient(
    logits: Tensor, is_local: Tensor, local_ids: Tensor, slopes: tuple[Tensor, Tensor | None], saved: list[Tensor]
) -> Tensor:
    """Return the gradient of the logits.

    ``saved``: log-sum-exp and entropy over all shards; empty without shards, where upstream recomputes them.
    """
    grad, grad_entropy = slopes
    probs = logits.softmax(1) if not saved else (logits - saved[0]).exp()
    out = torch.zeros_like(logits)
    one_hot = torch.zeros_like(logits).scatter_(1, local_ids, is_local.to(logits.dtype))
    out.add_(grad * (one_hot - probs))
    if grad_entropy is not None:
        logprobs = logits.log_softmax(1) if not saved else logits - saved[0]
        entropy = saved[1] if saved else (logits.logsumexp(1) - (probs * logits).sum(1))[:, None]
        out.add_(probs * (logprobs + entropy) * -grad_entropy)
    return out
