"""TRL f2cd577, ``trl/trainer/utils.py``: the language-model head by chunks of 8,192 vocabulary entries.

Logits in the dtype of the model, copied to fp32; a running log-sum-exp. Backward recomputes the logits and multiplies
in fp32, with fp32 copies of the chunk of the head and of the hidden states, into fp32 gradients. Two buffers serve all
chunks. No ids, the entropy has no gradient, no tensor parallelism. Prompt rows are left out; this task has none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from head_peers.shards import picked
from head_peers.task import Statistics, Task

CHUNK_VOCAB = 8192


def trl_chunked(task: Task) -> Statistics:
    """Compute log-probabilities with gradient and entropy without.

    Raises:
        ValueError: If there is a group: TRL does not shard the head.
    """
    if task.group is not None or task.entropy_gradient:
        raise ValueError("TRL's head has neither tensor parallelism nor a gradient of the entropy")
    logprobs, entropy = _Chunked.apply(task.hidden, task.weight, task.targets.labels, task.temperature)
    return Statistics(logprobs, entropy)


class _Buffers:
    """One product in the dtype of the model and one fp32 copy, reused by every chunk."""

    def __init__(self, hidden: Tensor, width: int, temperature: float) -> None:
        self.hidden, self.scale = hidden, 1 / temperature
        self.product = hidden.new_empty(len(hidden), width)
        self.wide = hidden.new_empty(len(hidden), width, dtype=torch.float32)

    def logits(self, weight: Tensor) -> Tensor:
        columns = slice(0, len(weight))
        torch.mm(self.hidden, weight.t(), out=self.product[:, columns])
        # Upstream also multiplies by the model's logit scale, 1 here as elsewhere: one more pass.
        return self.wide[:, columns].copy_(self.product[:, columns]).mul_(1.0).mul_(self.scale)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        count = len(hidden)
        largest = hidden.new_full((count,), -torch.inf, dtype=torch.float32)
        total, weighted, at_label = (hidden.new_zeros(count, dtype=torch.float32) for _ in range(3))
        buffers = _Buffers(hidden, CHUNK_VOCAB, temperature)
        for start in range(0, len(weight), CHUNK_VOCAB):
            logits = buffers.logits(weight[start : start + CHUNK_VOCAB])
            larger = torch.maximum(largest, logits.amax(1))
            rescale = (largest - larger).exp()
            exp = (logits - larger[:, None]).exp()
            total = total * rescale + exp.sum(1)
            weighted = weighted * rescale + (exp * logits).sum(1)
            largest = larger
            at_label += picked(logits, labels, start)
        log_total = largest + total.log()
        ctx.save_for_backward(hidden, weight, labels, log_total)
        ctx.temperature = temperature
        entropy = log_total - weighted / total
        ctx.mark_non_differentiable(entropy)
        return at_label - log_total, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, log_total = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        buffers = _Buffers(hidden, CHUNK_VOCAB, ctx.temperature)
        for start in range(0, len(weight), CHUNK_VOCAB):
            part = weight[start : start + CHUNK_VOCAB]
            probs = (buffers.logits(part) - log_total[:, None]).exp()
            out = -grad[:, None] * probs
            inside = (labels >= start) & (labels < start + len(part))
            local_ids = torch.where(inside, labels - start, 0)
            out.scatter_add_(1, local_ids[:, None], torch.where(inside, grad, 0.0)[:, None])
            out = out * buffers.scale
            out = out * 1.0  # the logit scale
            grad_hidden.add_(out @ part.float())
            grad_weight[start : start + CHUNK_VOCAB].add_(out.t() @ hidden.float())
        return grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype), None, None
