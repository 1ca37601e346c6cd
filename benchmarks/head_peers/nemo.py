"""NeMo-RL 7ea279a, ``nemo_rl/distributed/model_utils.py``: the logits path with K ids and entropy.

Three functions of the same bf16 logits, each over chunks of tokens, each with a distributed log-softmax of its own:
log-probability at the label, log-probabilities at K ids (forward only here: the loss takes them detached) and entropy.
Backward keeps the logits alone and recomputes the log-softmax with its two all-reduces; the mask of the label is a
one-hot matrix of int64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from head_peers.shards import local, picked, reduced
from head_peers.task import Statistics, Task

CHUNK_TOKENS = 1024
"""Value measured in perf.md; unset upstream, which means all tokens at once."""


def nemo_logits(task: Task) -> Statistics:
    """Compute the statistics with nine all-reduces per chunk."""
    logits = task.hidden @ task.weight.t()
    logits = logits if task.temperature == 1 else logits.div(task.temperature)
    logprobs = _LogProb.apply(logits, task.targets.labels, task.first, task.group)
    with torch.no_grad():
        id_logprobs = [
            reduced(picked(_log_softmax(logits[rows].float(), task.group), task.ids[rows], task.first), task.group)
            for rows in _chunks(logits)
        ]
    # Upstream's value is the sum of p log p.
    entropy = _NegativeEntropy.apply(logits, task.group, task.entropy_gradient).neg()
    return Statistics(logprobs, entropy, torch.cat(id_logprobs))


def _chunks(rows: Tensor) -> Iterator[slice]:
    for start in range(0, len(rows), CHUNK_TOKENS):
        yield slice(start, start + CHUNK_TOKENS)


def _log_softmax(logits: Tensor, group: ProcessGroup | None) -> Tensor:
    shifted = logits - reduced(logits.amax(1, keepdim=True), group, largest=True)
    total = reduced(shifted.exp().sum(1, keepdim=True), group)
    return shifted - total.log()


class _LogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int, group: ProcessGroup | None) -> Tensor:
        parts = [
            reduced(picked(_log_softmax(logits[rows].float(), group), labels[rows], first), group)
            for rows in _chunks(logits)
        ]
        ctx.save_for_backward(logits, *local(labels, first, logits.shape[1]))
        ctx.group = group
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, is_local, local_ids = ctx.saved_tensors
        out = torch.zeros_like(logits)
        for rows in _chunks(logits):
            softmax = _log_softmax(logits[rows].float(), ctx.group).exp()
            chosen = is_local[rows, None] * torch.nn.functional.one_hot(local_ids[rows], logits.shape[1])
            out[rows] = chosen.float().sub_(softmax).mul_(grad[rows, None])
            del softmax, chosen
        return out, None, None, None


class _NegativeEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: ProcessGroup | None, entropy_gradient: bool) -> Tensor:
        parts = []
        for rows in _chunks(logits):
            logprobs = _log_softmax(logits[rows].float(), group)
            parts.append(reduced((logprobs.exp() * logprobs).sum(1), group))
        negative_entropies = torch.cat(parts)
        ctx.group = group
        if entropy_gradient:
            ctx.save_for_backward(logits)
        else:
            ctx.mark_non_differentiable(negative_entropies)
        return negative_entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (logits,) = ctx.saved_tensors
        out = torch.empty_like(logits, dtype=torch.float32)
        for rows in _chunks(logits):
            logprobs = _log_softmax(logits[rows].float(), ctx.group)
            softmax = logprobs.exp()
            negative_entropy = reduced((softmax * logprobs).sum(1), ctx.group)
            out[rows].copy_(softmax.mul_(logprobs - negative_entropy[:, None])).mul_(grad[rows, None])
        return out, None, None
