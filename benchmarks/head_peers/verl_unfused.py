"""Unfused path of verl 1dda039 with log-probabilities at K ids, and its variant in Stable-RL c6af1d1.

verl: ``workers/engine/megatron/transformer_impl.py`` (clone of the fp32 logits, entropy, then Megatron's eager
cross-entropy in place on the clone), ``utils/megatron/tensor_parallel.py`` (entropy) and
``trainer/distillation/megatron/losses.py`` (log-softmax over the shards, gather at the ids). The product of softmax and
logits is compiled upstream, so it goes by blocks of rows here. Nothing asks for a gradient of the K log-probabilities.

Stable-RL: the same clone, entropy and cross-entropy; the K ids come from a log-softmax of the shard, compiled together
with its gather and without any collective, so at more than one rank they are those of the shard, not of the policy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from head_peers.shards import BLOCK_ROWS, fp32_logits, local, picked, reduced, row_dot
from head_peers.task import Statistics, Task


def verl_unfused(task: Task) -> Statistics:
    """Compute the statistics with nine all-reduces; peak: three fp32 tensors of the size of the logits."""
    logits = fp32_logits(task)
    spare = logits.clone()
    entropy = _Entropy.apply(logits, task.group)
    with torch.no_grad():
        id_logprobs = _ids_over_shards(spare, task)
    return Statistics(
        _CrossEntropy.apply(spare, task.targets.labels, task.first, task.group).neg(), entropy, id_logprobs
    )


def stable_rl(task: Task) -> Statistics:
    """Compute the statistics with six all-reduces; no ids over several ranks."""
    logits = fp32_logits(task)
    id_logprobs = None if task.group is not None else _ids_of_rows(logits.detach(), task.ids)
    spare = logits.clone()
    entropy = _Entropy.apply(logits, task.group)
    return Statistics(
        _CrossEntropy.apply(spare, task.targets.labels, task.first, task.group).neg(), entropy, id_logprobs
    )


def _ids_over_shards(logits: Tensor, task: Task) -> Tensor:
    largest = reduced(logits.amax(1), task.group, largest=True)
    shifted = logits - largest[:, None]
    total = reduced(shifted.exp().sum(1), task.group)
    logprobs = shifted - total.log()[:, None]
    logprobs.exp()  # the probabilities that verl's function keeps for its own backward; dropped with its graph
    return reduced(picked(logprobs, task.ids, task.first), task.group)


def _ids_of_rows(logits: Tensor, ids: Tensor) -> Tensor:
    blocks = zip(logits.split(BLOCK_ROWS), ids.split(BLOCK_ROWS), strict=True)
    return torch.cat([block.log_softmax(1).gather(1, at) for block, at in blocks])


class _Entropy(torch.autograd.Function):
    """Entropy that keeps the logits and a softmax. Backward works in place in both, as upstream does."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: ProcessGroup | None) -> Tensor:
        largest = reduced(logits.amax(1, keepdim=True), group, largest=True)
        softmax = (logits - largest).exp_()
        total = reduced(softmax.sum(1, keepdim=True), group)
        softmax.div_(total)
        mean = reduced(row_dot(softmax, logits), group)
        ctx.save_for_backward(logits, softmax, mean)
        return (largest + total.log() - mean).squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, softmax, mean = ctx.saved_tensors
        raw = logits.detach()
        raw.sub_(mean)
        softmax.mul_(raw).mul_(grad[:, None])
        raw.add_(mean)
        return softmax.neg_(), None


class _CrossEntropy(torch.autograd.Function):
    """Megatron's eager vocabulary-parallel cross-entropy: everything in the storage of the fp32 logits it is given."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int, group: ProcessGroup | None) -> Tensor:
        softmax = logits.detach()
        softmax.sub_(reduced(softmax.amax(1), group, largest=True)[:, None])
        at_label = reduced(picked(softmax, labels, first), group)
        total = reduced(softmax.exp_().sum(1), group)
        softmax.div_(total[:, None])
        ctx.save_for_backward(softmax, *local(labels, first, logits.shape[1]))
        return total.log() - at_label

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, is_local, local_ids = ctx.saved_tensors
        softmax.scatter_add_(1, local_ids[:, None], -is_local.to(softmax.dtype)[:, None])
        return softmax.mul_(grad[:, None]), None, None, None
