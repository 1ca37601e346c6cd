"""Log-probabilities and entropy of vocabulary-parallel logits.

The vocabulary of V entries (padded to V_local * group size) is split in equal shards over the group: rank r holds the
global ids ``[r * V_local, (r + 1) * V_local)``. Per row, with ``z = logits / temperature`` and ``m`` its maximum:

    s = sum exp(z - m)          u = sum (z - m) exp(z - m)          y = z[label] - m
    log p(label) = y - log s    entropy = log s - u / s

    d log p / dz_j = [j = label] - p_j          d entropy / dz_j = -p_j (log p_j + entropy)

and with a set of ids ``o = sum of exp(z - m)`` and ``q = sum of exp(2 (z - m))`` outside it, ``y_i = z[id_i] - m``:

    log p(other) = log o - log s    sum of p^2 over other = q / s^2    log p(id_i) = y_i - log s

Collectives: one MAX all-reduce of T numbers and one SUM all-reduce of 3 T numbers (s, u, y) in forward, 16 T bytes in
fp32; with S ids a row the SUM has (3 + 2 + S) T numbers (s, u, y, o, q, y_i). None in backward, because every rank then
knows m, s and the entropy. Without a group, or with one rank: none.

Memory, with b bytes per logit and c = 4 (8 for float64 logits): forward needs 2 c T V_local bytes while it runs, with
ids or without, and keeps only the logits it was given (b T V_local, no copy) and O(T) numbers; backward makes the
gradient of the logits and one c T V_local scratch tensor (two with an entropy gradient).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatron_dppo.head.mixed_gemm import accumulation_dtype

_UNDERFLOW = -1e4
"""Finite stand-in for log 0. Its exp is 0 in every dtype, so that 0 log 0 gives 0 without a branch."""


def vocab_parallel_logprobs(
    logits: Tensor, labels: Tensor, *, group: ProcessGroup | None, vocab_size: int, temperature: float = 1.0
) -> Tensor:
    """Return the log-probability of each label, in nats, with gradient.

    Example:
        >>> logits = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]).log()
        >>> vocab_parallel_logprobs(logits, torch.tensor([0, 2]), group=None, vocab_size=3).exp()
        tensor([0.5000, 0.7000])

    Args:
        logits: This rank's shard. Shape [T, V_local].
        labels: Global ids, int64, the same on all ranks. Shape [T].
        group: Vocabulary-parallel group. None: not sharded.
        vocab_size: V without padding.
        temperature: Divides the logits.

    Returns:
        ``[T]`` in fp32, or in float64 for float64 logits; equal on all ranks of the group.

    Raises:
        ValueError: Shapes or dtypes do not fit, the shards cannot hold the vocabulary, the temperature is not positive,
            or a label is outside the vocabulary. On CUDA a bad label is a device-side assertion instead, because a
            check on the host would wait for the device.
    """
    return statistics_at(logits, labels, None, None, group, vocab_size, temperature)[0]


def statistics_at(
    logits: Tensor,
    labels: Tensor,
    ids: Tensor | None,
    ids_valid: Tensor | None,
    group: ProcessGroup | None,
    vocab_size: int,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Log p(label), entropy, log p(id), log p(other) and sum of p^2 over other; the caller has checked the ids.

    The last three are None without ids. Arguments, results and errors: ``vocab_topk.vocab_parallel_statistics``.
    """
    first, shard_size = shard_range(logits, group, vocab_size, temperature)
    _check_labels(logits, labels, vocab_size)
    apply: Callable[..., tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]]
    apply = _VocabParallelStatistics.apply
    return apply(logits, labels, ids, ids_valid, group, first, shard_size, temperature)


def shard_range(logits: Tensor, group: ProcessGroup | None, vocab_size: int, temperature: float) -> tuple[int, int]:
    """Return the global id of this shard's first entry, and the number of its entries that are not padding."""
    shards, rank = (1, 0) if group is None else (group.size(), group.rank())
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(f"expected float logits [T, V_local], got {logits.dtype} {tuple(logits.shape)}")
    width = logits.shape[1]
    if not 0 < vocab_size <= width * shards:
        raise ValueError(f"vocab_size = {vocab_size} does not fit {shards} shards of {width} logits")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    return rank * width, max(0, min(vocab_size - rank * width, width))


def _check_labels(logits: Tensor, labels: Tensor, vocab_size: int) -> None:
    if labels.shape != logits.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(
            "expected logits [T, V_local] and int64 labels [T], "
            f"got {tuple(logits.shape)}, {tuple(labels.shape)} of {labels.dtype}"
        )
    in_range = (labels >= 0) & (labels < vocab_size)
    if labels.is_cuda:
        torch._assert_async(in_range.all(), f"a label is outside the vocabulary [0, {vocab_size})")
    elif not bool(in_range.all()):
        bad = int(labels[~in_range][0])
        raise ValueError(f"label {bad} is outside the vocabulary [0, {vocab_size})")


def row_maximum(logits: Tensor, shard_size: int) -> Tensor:
    """Return the largest of the first ``shard_size`` logits of each row, ``[T]``, -inf without any."""
    if shard_size == 0:
        return torch.full_like(logits[:, 0], -torch.inf, dtype=accumulation_dtype(logits))
    return logits[:, :shard_size].amax(dim=1).to(accumulation_dtype(logits))


def shifted(logits: Tensor, shard_size: int, maximum: Tensor, temperature: float) -> Tensor:
    """Return a new ``[T, shard_size]`` tensor of (logits - maximum) / temperature, in the dtype of the statistics.

    The difference comes first: a quotient of large logits is rounded to their size, not to that of the difference.
    """
    return logits[:, :shard_size].to(accumulation_dtype(logits), copy=True).sub_(maximum[:, None]).div_(temperature)


class _VocabParallelStatistics(torch.autograd.Function):
    """Saves the logits it was given and recomputes the probabilities in backward.

    ``first`` is the global id of the shard's first entry, ``shard_size`` the number of its entries that are not
    padding. With ``ids`` and ``ids_valid [T, S]`` the third result is log p(id) ``[T, S]``, -inf in invalid slots, the
    fourth log p(other) ``[T]`` and the fifth the sum of p^2 there, these two without gradient; otherwise all three are
    None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        ids: Tensor | None,
        ids_valid: Tensor | None,
        group: ProcessGroup | None,
        first: int,
        shard_size: int,
        temperature: float,
    ) -> tuple[Tensor | None, ...]:
        group = None if group is None or group.size() == 1 else group
        maximum = row_maximum(logits, shard_size)
        if group is not None:
            dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
        is_local, index = _local(labels, first, shard_size)
        in_set, slots = (None, None) if ids is None else _local(ids, first, shard_size)
        if in_set is not None and ids_valid is not None:
            in_set &= ids_valid
        sums = maximum.new_zeros(3 if ids is None else 5 + ids.shape[1], len(labels))
        if shard_size:
            _sum_shard(shifted(logits, shard_size, maximum, temperature), sums, is_local, index, in_set, slots)
        if group is not None:
            dist.all_reduce(sums, group=group)
        log_total = sums[0].log()
        entropy = log_total - sums[1] / sums[0]
        # The logits are the caller's tensor, not a copy; probabilities are computed again in backward.
        ctx.save_for_backward(logits, maximum, sums[0], entropy, index, is_local, in_set, slots)
        ctx.shard_size, ctx.temperature = shard_size, temperature
        ctx.set_materialize_grads(False)
        if ids_valid is None:
            return sums[2] - log_total, entropy, None, None, None
        id_logprobs = torch.where(ids_valid, (sums[5:] - log_total).T, -torch.inf)
        other, square = sums[3].log() - log_total, sums[4] / sums[0].square()
        ctx.mark_non_differentiable(other, square)
        return sums[2] - log_total, entropy, id_logprobs, other, square

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
        grad_ids: Tensor | None,
        *_: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        logits, maximum, total, entropy, index, is_local, in_set, slots = ctx.saved_tensors
        no_gradients = (None,) * 7
        if grad_logprobs is None and grad_entropy is None and grad_ids is None:
            return None, *no_gradients
        at_label = torch.zeros_like(entropy) if grad_logprobs is None else grad_logprobs
        # Every log-probability of the row subtracts p_j times its own derivative, so these derivatives add up.
        grad_logprobs = at_label if grad_ids is None else at_label + grad_ids.sum(1)
        # p = exp(z - m) / s with the division on the row's factor: z - (m + log s) would round off where m is large.
        grad = shifted(logits, ctx.shard_size, maximum, ctx.temperature)
        if grad_entropy is None:
            grad.exp_().mul_((-grad_logprobs / total)[:, None])
        else:
            # -p (g + g_H (log p + H)) without a third tensor of this size
            exp = grad.exp()
            slope = -grad_entropy / total
            base = slope * (entropy - total.log()) - grad_logprobs / total
            grad.clamp_(min=_UNDERFLOW).mul_(slope[:, None]).add_(base[:, None]).mul_(exp)
        if ctx.shard_size:
            grad.scatter_add_(1, index[:, None], torch.where(is_local, at_label, 0.0)[:, None])
            if grad_ids is not None:
                grad.scatter_add_(1, slots, torch.where(in_set, grad_ids, 0.0))
        grad.div_(ctx.temperature)
        if ctx.shard_size == logits.shape[1]:
            return grad.to(logits.dtype), *no_gradients
        padded = torch.zeros_like(logits)
        padded[:, : ctx.shard_size] = grad
        return padded, *no_gradients


def _sum_shard(
    z: Tensor, sums: Tensor, is_local: Tensor, index: Tensor, in_set: Tensor | None, slots: Tensor | None
) -> None:
    """Write this shard's sums (s, u, y; o, q, y_i with ids) into the rows of ``sums``, and overwrite ``z``."""
    sums[2] = torch.where(is_local, z.gather(1, index[:, None]).squeeze(1), 0.0)
    if in_set is not None and slots is not None:
        sums[5:] = torch.where(in_set, z.gather(1, slots), 0.0).T
    exp = z.exp()
    sums[0] = exp.sum(1)
    sums[1] = z.clamp_(min=_UNDERFLOW).mul_(exp).sum(1)
    if in_set is not None and slots is not None:
        # Times 0 at the set and times 1 where a slot is not of this shard: no subtraction, so no cancellation.
        exp.scatter_reduce_(1, slots, (~in_set).to(exp.dtype), "prod")
        sums[3] = exp.sum(1)
        sums[4] = exp.square_().sum(1)


def _local(ids: Tensor, first: int, shard_size: int) -> tuple[Tensor, Tensor]:
    """Return a mask of the global ids of this shard, and their index in it (0 for other ids)."""
    is_local = (ids >= first) & (ids < first + shard_size)
    return is_local, torch.where(is_local, ids - first, 0)
