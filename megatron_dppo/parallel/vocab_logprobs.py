"""Log-probabilities and entropy of vocabulary-parallel logits.

The vocabulary of V entries (padded to V_local * group size) is split in equal shards over the group: rank r holds the
global ids ``[r * V_local, (r + 1) * V_local)``. Per row, with ``z = logits / temperature`` and ``m`` its maximum:

    s = sum exp(z - m)          u = sum (z - m) exp(z - m)          y = z[label] - m
    log p(label) = y - log s    entropy = log s - u / s

    d log p / dz_j = [j = label] - p_j          d entropy / dz_j = -p_j (log p_j + entropy)

Collectives: one MAX all-reduce of T numbers and one SUM all-reduce of 3 T numbers (s, u, y) in forward, 16 T bytes in
fp32; none in backward, because every rank then knows m, s and the entropy. Without a group, or with one rank: none.

Memory, with b bytes per logit and S = 4 (8 for float64 logits): forward needs 2 S T V_local bytes while it runs and
keeps only the logits it was given (b T V_local, no copy) and O(T) numbers; backward makes the gradient of the logits
and one S T V_local scratch tensor (two with an entropy gradient).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

_UNDERFLOW = -1e4
"""exp of this is 0 in every dtype; a finite stand-in for log 0, so that 0 log 0 comes out as 0 without a branch."""


def vocab_parallel_logprobs_and_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    group: ProcessGroup | None,
    vocab_size: int,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label and entropy of each row, in nats, with gradients for both.

    Args:
        logits: ``[T, V_local]`` this rank's shard, any float dtype; ``-inf`` means probability 0. Not to be changed in
            place before backward.
        labels: ``[T]`` int64 global ids, the same on all ranks of the group.
        group: the vocabulary-parallel group; None = not sharded.
        vocab_size: V without padding. Padded entries (global id >= V) never enter the softmax and get gradient 0.
        temperature: divides the logits.

    Returns:
        ``(logprobs [T], entropy [T])`` in fp32, or in float64 for float64 logits; equal on all ranks of the group.
        A row whose entries are all ``-inf`` has no distribution and gives NaN.

    Raises:
        ValueError: shapes or dtypes do not fit, the shards cannot hold the vocabulary, the temperature is not positive,
            or a label is outside the vocabulary. On CUDA a bad label is a device-side assertion instead, because a
            check on the host would wait for the device.
    """
    shards, rank = (1, 0) if group is None else (group.size(), group.rank())
    _check_arguments(logits, labels, shards, vocab_size, temperature)
    _check_labels(labels, vocab_size)
    first = rank * logits.shape[1]
    own = max(0, min(vocab_size - first, logits.shape[1]))
    apply: Callable[..., tuple[Tensor, Tensor]] = _VocabParallelStatistics.apply
    return apply(logits, labels, group if shards > 1 else None, first, own, temperature)


def _check_arguments(logits: Tensor, labels: Tensor, shards: int, vocab_size: int, temperature: float) -> None:
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(f"expected logits [T, V_local], labels [T], got {tuple(logits.shape)}, {tuple(labels.shape)}")
    if not logits.is_floating_point() or labels.dtype != torch.int64:
        raise ValueError(f"expected float logits and int64 labels, got {logits.dtype} and {labels.dtype}")
    if not 0 < vocab_size <= logits.shape[1] * shards:
        raise ValueError(f"vocab_size = {vocab_size} does not fit {shards} shards of {logits.shape[1]} logits")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")


def _check_labels(labels: Tensor, vocab_size: int) -> None:
    in_range = (labels >= 0) & (labels < vocab_size)
    if labels.is_cuda:
        torch._assert_async(in_range.all(), f"a label is outside the vocabulary [0, {vocab_size})")
    elif not bool(in_range.all()):
        bad = int(labels[~in_range][0])
        raise ValueError(f"label {bad} is outside the vocabulary [0, {vocab_size})")


class _VocabParallelStatistics(torch.autograd.Function):
    """Saves the logits it was given and recomputes the probabilities in backward.

    ``first`` is the global id of the shard's first entry, ``own`` the number of its entries that are not padding.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, group: ProcessGroup | None, first: int, own: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        scaled = _scaled(logits, own, temperature)
        maximum = scaled.amax(dim=1) if own else scaled.new_full((scaled.shape[0],), -torch.inf)
        if group is not None:
            dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
        scaled.sub_(maximum[:, None])
        is_local = (labels >= first) & (labels < first + own)
        index = torch.where(is_local, labels - first, 0)
        sums = scaled.new_zeros(3, scaled.shape[0])
        if own:
            sums[2] = torch.where(is_local, scaled.gather(1, index[:, None]).squeeze(1), 0.0)
            exp = scaled.exp()
            sums[0] = exp.sum(1)
            sums[1] = exp.mul_(scaled.clamp_(min=_UNDERFLOW)).sum(1)
        if group is not None:
            dist.all_reduce(sums, group=group)
        log_total = sums[0].log()
        entropy = log_total - sums[1] / sums[0]
        ctx.save_for_backward(logits, maximum, sums[0], entropy, index, is_local)
        ctx.own, ctx.temperature = own, temperature
        ctx.set_materialize_grads(False)
        return sums[2] - log_total, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, maximum, total, entropy, index, is_local = ctx.saved_tensors
        if grad_logprobs is None and grad_entropy is None:
            return None, None, None, None, None, None
        grad_logprobs = torch.zeros_like(entropy) if grad_logprobs is None else grad_logprobs
        # p = exp(z - m) / s with the division on the row's factor: z - (m + log s) would round off where m is large.
        grad = _scaled(logits, ctx.own, ctx.temperature).sub_(maximum[:, None])
        if grad_entropy is None:
            grad.exp_().mul_((-grad_logprobs / total)[:, None])
        else:
            # -p (g + g_H (log p + H)) without a third tensor of this size
            exp = grad.exp()
            slope = -grad_entropy / total
            base = slope * (entropy - total.log()) - grad_logprobs / total
            grad.clamp_(min=_UNDERFLOW).mul_(slope[:, None]).add_(base[:, None]).mul_(exp)
        if ctx.own:
            grad.scatter_add_(1, index[:, None], torch.where(is_local, grad_logprobs, 0.0)[:, None])
        grad.div_(ctx.temperature)
        if ctx.own == logits.shape[1]:
            return grad.to(logits.dtype), None, None, None, None, None
        padded = torch.zeros_like(logits)
        padded[:, : ctx.own] = grad
        return padded, None, None, None, None, None


def _scaled(logits: Tensor, own: int, temperature: float) -> Tensor:
    """A fresh ``[T, own]`` tensor of logits over temperature, in the dtype of the statistics."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits[:, :own].to(dtype, copy=True).div_(temperature)
