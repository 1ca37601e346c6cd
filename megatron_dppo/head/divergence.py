"""Divergences of two distributions over shards of a vocabulary, and their gradient in the logits of the first.

With p the student's and q the teacher's softmax of a row, a = log p - log q and m = b q + (1 - b) p:

    reverse = sum p a     forward = -sum q a     jsd = (1 - b) sum p log(p / m) + b sum q log(q / m)

Their derivatives by a logit of the student, before the temperature divides it:

    p (a - reverse)       p - q                  (1 - b) p (log(p / m) - sum p log(p / m))

Both passes go through a few rows at a time: what they need beside the two chunks of logits is small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_dppo.types import Divergence

_LOG_ZERO = -1e4
"""exp of it is 0; a finite stand-in for log 0, so that 0 log 0 comes out as 0 without a branch."""
_BLOCK_BYTES = 1 << 20
"""Of a block of rows on the CPU: a few of them are in the cache of a core."""
_CUDA_BLOCK_BYTES = 1 << 26


class Side(NamedTuple):
    """One of the two distributions on a shard, by row."""

    logits: Tensor
    """[n, W]"""
    maximum: Tensor
    """[n] the largest logit of the whole row, before the temperature"""
    log_total: Tensor
    """[n] log of the sum of exp((logit - maximum) / temperature) over the whole row"""


def shard_totals(logits: Tensor, own: int, temperature: float) -> Tensor:
    """``[n, 2]``: the largest of the first ``own`` of ``logits [n, W]`` and the sum of exp((logit - it) / temperature),
    -inf and 0 of a shard without entries."""
    found = logits.new_zeros(len(logits), 2)
    if not own or not len(logits):
        found[:, 0] = -torch.inf
        return found
    for block, out in _blocks(own, logits[:, :own], found):
        out[:, 0] = block.amax(1)
        top = out[:, :1].clamp(min=torch.finfo(block.dtype).min)
        out[:, 1] = ((block - top) / temperature).exp_().sum(1)
    return found


def merge_totals(parts: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The shards' ``[ranks, n, 2]`` to the maximum and the log of the total of the whole rows, ``[n]`` each."""
    maximum = parts[..., 0].amax(0)
    return maximum, (((parts[..., 0] - maximum) / temperature).exp() * parts[..., 1]).sum(0).log()


def shard_sums(student: Side, teacher: Side, own: int, temperature: float, divergence: Divergence) -> Tensor:
    """``[n, 4]`` this shard's part of reverse, forward, sum p log(p / m) and sum q log(q / m), the last two for ``jsd``
    only. The teacher's logits become its log-probabilities."""
    sums = student.maximum.new_zeros(len(student.maximum), 4)
    if not own or not len(sums):
        return sums
    columns = (sums, student.maximum, student.log_total, teacher.maximum, teacher.log_total)
    for z, u, out, top_p, total_p, top_q, total_q in _blocks(
        own, student.logits[:, :own], teacher.logits[:, :own], *columns
    ):
        log_p = _log_probabilities(z, top_p, total_p, temperature)
        log_q = u.copy_(_log_probabilities(u, top_q, total_q, temperature))
        p, q, a = log_p.exp(), log_q.exp(), log_p - log_q
        out[:, 0] = (p * a).sum(1)
        out[:, 1] = -(q * a).sum(1)
        if divergence.name == "jsd":
            log_m = _log_mixture(log_p, log_q, divergence.share)
            out[:, 2] = p.mul_(log_p - log_m).sum(1)
            out[:, 3] = q.mul_(log_q - log_m).sum(1)
    return sums


def values(sums: Tensor, divergence: Divergence) -> Tensor:
    """``[n]`` the divergence from the sums ``[n, 4]`` of all shards, without its coefficient."""
    reverse, forward, of_student, of_teacher = sums.unbind(1)
    if divergence.name == "jsd":
        return (1 - divergence.share) * of_student + divergence.share * of_teacher
    share = {"reverse_kl": 0.0, "forward_kl": 1.0, "mixed_kl": divergence.share}[divergence.name]
    return (1 - share) * reverse + share * forward


def gradient_(
    student: Side, log_q: Tensor, own: int, sums: Tensor, weights: Tensor, temperature: float, divergence: Divergence
) -> Tensor:
    """``[n, W]`` the gradient of the student's logits, written over the teacher's log-probabilities.

    Args:
        student: its logits as they are.
        log_q: ``[n, W]`` what ``shard_sums`` left of the teacher's logits.
        own: entries of the shard that are not padding, whose gradient is 0.
        sums: ``[n, 4]`` of all shards.
        weights: ``[n]`` the derivative of the loss in the divergence of each row.
        temperature: divides the logits.
        divergence: which one; its coefficient is in the weights.
    """
    log_q[:, own:] = 0.0
    if not own or not len(log_q):
        return log_q
    name, share = divergence.name, divergence.share
    rows = (student.maximum, student.log_total, sums, weights / temperature)
    for z, target, maximum, total, of_row, weight in _blocks(own, student.logits[:, :own], log_q[:, :own], *rows):
        log_p = _log_probabilities(z, maximum, total, temperature)
        p = log_p.exp()
        if name == "jsd":
            log_m = _log_mixture(log_p, target, share)
            slope = (log_p.sub_(log_m).sub_(of_row[:, 2:3])).mul_(p).mul_(1 - share)
        else:
            forward = {"reverse_kl": 0.0, "forward_kl": 1.0, "mixed_kl": share}[name]
            slope = log_p.sub_(target).sub_(of_row[:, :1]).mul_(1 - forward).mul_(p)
            if forward:
                slope.add_(p.sub_(target.exp()), alpha=forward)
        target.copy_(slope.mul_(weight[:, None]))
    return log_q


def add_(out: Tensor, gradient: Tensor) -> Tensor:
    """``gradient [n, W]``, which is used up, added to ``out [n, W]`` of the same or a narrower type; rounded once."""
    if len(out):
        for target, block in _blocks(out.shape[1], out, gradient):
            target.copy_(block.add_(target))
    return out


def _log_probabilities(logits: Tensor, maximum: Tensor, log_total: Tensor, temperature: float) -> Tensor:
    z = (logits - maximum[:, None]).mul_(1 / temperature)
    return z.sub_(log_total[:, None]).clamp_(min=_LOG_ZERO)


def _log_mixture(log_p: Tensor, log_q: Tensor, share: float) -> Tensor:
    return torch.logaddexp(log_p + math.log1p(-share), log_q + math.log(share))


def _blocks(own: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same few rows of each tensor at a time."""
    size = _CUDA_BLOCK_BYTES if tensors[0].is_cuda else _BLOCK_BYTES
    step = max(1, size // (own * tensors[0].element_size()))
    return zip(*(tensor.split(step) for tensor in tensors), strict=True)
