"""Log-probability and entropy of fp32 logits in one function: slime 624b824, ``slime/utils/ppo_utils.py``.

One softmax serves both and is what backward keeps, with the logits where the entropy has a gradient. No ids. The
product of softmax and logits is an einsum on CUDA; here it goes by blocks of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from head_peers.shards import local, picked, reduced, row_dot
from head_peers.task import Statistics, Task


def slime(task: Task) -> Statistics:
    """Compute the statistics with four all-reduces."""
    logits = (task.hidden @ task.weight.t()).float()
    logits = logits if task.temperature == 1 else logits.div(task.temperature)
    logprobs, entropy = _LogProbEntropy.apply(
        logits, task.targets.labels, task.first, task.group, task.entropy_gradient
    )
    return Statistics(logprobs, entropy)


class _LogProbEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, first: int, group: ProcessGroup | None, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        largest = reduced(logits.amax(1, keepdim=True), group, largest=True)
        softmax = logits - largest
        at_label = picked(softmax, labels, first)
        total = reduced(softmax.exp_().sum(1, keepdim=True), group)
        softmax.div_(total)
        mean = reduced(row_dot(softmax, logits), group)
        reduced(at_label, group)
        entropy = (largest + total.log() - mean).squeeze(1)
        saved = (logits, mean) if entropy_gradient else ()
        ctx.save_for_backward(softmax, *local(labels, first, logits.shape[1]), *saved)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return at_label - total.log().squeeze(1), entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        softmax, is_local, local_ids, *saved = ctx.saved_tensors
        from_entropy = None
        if saved:
            from_entropy = (saved[1] - saved[0]).mul_(softmax).mul_(grad_entropy[:, None])
        softmax.neg_().scatter_add_(1, local_ids[:, None], is_local.to(softmax.dtype)[:, None]).mul_(grad[:, None])
        return softmax if from_entropy is None else softmax.add_(from_entropy), None, None, None, None
