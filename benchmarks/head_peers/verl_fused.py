"""Fused linear cross-entropy of verl 1dda039 (``verl/utils/kernel/kernels.py``): its algorithm, in chunks.

Forward: blocks of 1,024 vocabulary entries; the kernel keeps a block's fp32 logits in registers and stores three
partial results a token and block (largest logit, sum, entropy term). Backward: blocks of 9,504 entries; a kernel
recomputes the logits and stores their gradient in the dtype of the model, then two plain GEMMs, the gradient of the
hidden states summed over the blocks in the dtype of the model. Three all-reduces. No ids.

On a GPU the logits never leave the chip. Here a block of them stays in the cache, and the GEMM is the one that our own
head uses for fp32 logits, so that neither side gains by it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from head_peers.shards import local, picked, reduced
from head_peers.task import Statistics, Task
from megatron_dppo.head.mixed_gemm import logits_into

FORWARD_VOCAB, BACKWARD_VOCAB = 1024, 9504


def verl_fused(task: Task) -> Statistics:
    """Compute log-probabilities and entropy, both with gradient."""
    logprobs, entropy = _FusedLinear.apply(
        task.hidden, task.weight, task.targets.labels, task.temperature, task.first, task.group, task.entropy_gradient
    )
    return Statistics(logprobs, entropy)


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Return the fp32 products of a block."""
    out = hidden.new_empty(len(hidden), len(weight), dtype=torch.float32)
    return logits_into(hidden, weight, None, out).div_(temperature)


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
        blocks = range(0, len(weight), FORWARD_VOCAB)
        largest, total, weighted = (hidden.new_empty(len(hidden), len(blocks), dtype=torch.float32) for _ in range(3))
        at_label = hidden.new_zeros(len(hidden), dtype=torch.float32)
        for block, start in enumerate(blocks):
            logits = _logits(hidden, weight[start : start + FORWARD_VOCAB], temperature)
            at_label += picked(logits, labels, first + start)
            torch.amax(logits, 1, out=largest[:, block])
            exp = (logits - largest[:, block, None]).exp_()
            torch.sum(exp, 1, out=total[:, block])
            torch.sum(exp.mul_(logits), 1, out=weighted[:, block])
        # Every rank's largest logit of each block goes round; a rank's own ones stay, to rescale its sums.
        local_largest = largest.clone() if group is not None else largest
        row_largest = reduced(largest, group, largest=True).amax(1)
        reduced(at_label, group)
        scale = (local_largest - row_largest[:, None]).exp()
        sums = reduced(torch.stack([(total * scale).sum(1), (weighted * scale).sum(1)]), group)
        log_total = row_largest + sums[0].log()
        entropy = log_total - sums[1] / sums[0]
        ctx.save_for_backward(hidden, weight, *local(labels, first, len(weight)), log_total, entropy)
        ctx.temperature, ctx.entropy_gradient = temperature, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return at_label - log_total, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, is_local, local_ids, log_total, entropy = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)
        out = hidden.new_empty(len(hidden), min(BACKWARD_VOCAB, len(weight)))
        for start in range(0, len(weight), BACKWARD_VOCAB):
            part = weight[start : start + BACKWARD_VOCAB]
            block = out[:, : len(part)]
            for at in range(0, len(part), FORWARD_VOCAB):
                columns = slice(at, at + FORWARD_VOCAB)
                logprobs = _logits(hidden, part[columns], ctx.temperature).sub_(log_total[:, None])
                slope = _row_gradient(ctx, logprobs, grad, grad_entropy, entropy)
                inside, column = local(torch.where(is_local, local_ids, -1), start + at, slope.shape[1])
                at_label = torch.where(inside, grad / ctx.temperature, 0.0)
                block[:, columns] = slope.scatter_add_(1, column[:, None], at_label[:, None])
            torch.mm(block.t(), hidden, out=grad_weight[start : start + BACKWARD_VOCAB])
            if start == 0:
                torch.mm(block, part, out=grad_hidden)
            else:
                grad_hidden += block @ part
        return grad_hidden, grad_weight, None, None, None, None, None


def _row_gradient(ctx: Any, logprobs: Tensor, grad: Tensor, grad_entropy: Tensor, entropy: Tensor) -> Tensor:
    """Return the gradient without the label's term. Overwrites ``logprobs``."""
    slope = -grad[:, None] / ctx.temperature
    if ctx.entropy_gradient:
        pull = grad_entropy[:, None] / ctx.temperature
        return logprobs.exp().mul_(slope - pull * (logprobs + entropy[:, None]))
    return logprobs.exp_().mul_(slope)
