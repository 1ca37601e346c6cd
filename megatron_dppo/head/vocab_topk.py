"""Statistics of vocabulary-parallel logits at a set of ids, and the distributed Top-K.

Sharding, symbols and memory are those of ``vocab_logprobs``.

Top-K: each rank sends its own K largest logits with their ids, and the sum of ``exp(z - m)`` over its shard for its own
maximum ``m``, which is the first of the K; every rank merges the same candidates. One all-gather of (2 K + 1) T numbers
from each rank, 4 (2 K + 1) T bytes in fp32 (K at most V_local), none without a group or with one rank.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dppo.head.vocab_logprobs import row_maximum, shard_range, shifted, statistics_at


class HeadStatistics(NamedTuple):
    """Per-token statistics in nats, fp32 or float64, equal on all ranks of the group; 0 in rows outside a plan."""

    logprobs: Tensor
    """[T] log p(label), with gradient"""
    entropy: Tensor
    """[T] with gradient where that was asked for"""
    id_logprobs: Tensor | None
    """[T, K] log p(id), with gradient where that was asked for; -inf in unused slots, and where the probability is 0.
    None without ids."""
    other_logprob: Tensor | None
    """[T] log of the mass outside the label and the valid ids, without gradient. None without ids."""
    other_square: Tensor | None
    """[T] sum of p^2 outside the label and the valid ids, without gradient, where that was asked for"""
    topk_logprobs: Tensor | None = None
    """[T, k] the policy's own Top-k by rank, without gradient. None with ``topk = 0``."""
    topk_ids: Tensor | None = None
    """[T, k] int64 global ids"""


def vocab_parallel_statistics(
    logits: Tensor,
    labels: Tensor,
    *,
    group: ProcessGroup | None,
    vocab_size: int,
    temperature: float = 1.0,
    ids: Tensor | None = None,
    ids_valid: Tensor | None = None,
) -> HeadStatistics:
    """Everything that the Top-K losses need of the policy, in one pass: arXiv 2602.04879, equations 15 and 16.

    The mass outside the set is summed over the entries outside it, not subtracted from 1, so it keeps its relative
    precision where the set holds almost all of the mass. Only a mass below the smallest positive number of the dtype
    (1e-45 of the largest probability in fp32) becomes 0.

    The arguments, their checks and errors are those of ``vocab_parallel_logprobs``. The logits must not be changed in
    place before backward. Of a row of ``ids [T, S]`` (int64, global, the same on all ranks) the valid ones are
    distinct; what stands in a slot with ``ids_valid`` False is ignored. Without a set it costs nothing over
    ``vocab_parallel_logprobs``. A row whose entries are all ``-inf`` has no distribution and gives NaN.
    """
    _check_ids(logits, ids, ids_valid, vocab_size)
    return HeadStatistics(*statistics_at(logits, labels, ids, ids_valid, group, vocab_size, temperature))


@torch.no_grad()
def vocab_parallel_topk(
    logits: Tensor, k: int, *, group: ProcessGroup | None, vocab_size: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the k most probable ids of each row, without gradient.

    Ordered by logit, the lower id first where logits are equal; the order does not depend on the group, the temperature
    or the device. Entries of probability 0 come last, by id. Padding is never among them.

    Example:
        >>> logits = torch.tensor([[0.2, 0.5, 0.3, 9.0]]).log()  # the fourth column pads the vocabulary of three
        >>> logprobs, ids = vocab_parallel_topk(logits, 2, group=None, vocab_size=3)
        >>> ids, logprobs.exp()
        (tensor([[1, 2]]), tensor([[0.5000, 0.3000]]))

    Args:
        logits: ``[T, V_local]`` this rank's shard, any float dtype.
        k: Number of ids a row, from 1 to V; may be above V_local.
        group: The vocabulary-parallel group; None = not sharded.
        vocab_size: V without padding.
        temperature: Divides the logits.

    Returns:
        ``(logprobs [T, k], ids [T, k] int64)``, log-probabilities over the whole vocabulary in nats, in fp32, or in
        float64 for float64 logits; equal on all ranks of the group. NaN log-probabilities in a row without a
        distribution (all ``-inf``).

    Raises:
        ValueError: Before any collective: the logits are not a float matrix, the shards cannot hold the vocabulary, the
            temperature is not positive, or k is not in [1, V].
    """
    first, shard_size = shard_range(logits, group, vocab_size, temperature)
    if not 1 <= k <= vocab_size:
        raise ValueError(f"k must be from 1 to vocab_size = {vocab_size}, got {k}")
    maximum = row_maximum(logits, shard_size)
    finite_maximum = torch.where(maximum == -torch.inf, 0.0, maximum)  # a shard may hold nothing but -inf
    total = shifted(logits, shard_size, finite_maximum, temperature).exp_().sum(1)
    values, places = shard_topk(logits[:, :shard_size], min(k, logits.shape[1]), total.dtype)
    ids = places + first
    if group is not None and group.size() > 1:
        values, ids, maximum, total = _gather(values, ids, total, temperature, group)
    # Equal values stand by rising id already, and what fills up a short shard stands after every entry.
    order = values.argsort(dim=1, descending=True, stable=True)[:, :k]
    logprobs = (values.gather(1, order) - maximum[:, None]) / temperature - total.log()[:, None]
    return logprobs, ids.gather(1, order)


def _check_ids(logits: Tensor, ids: Tensor | None, valid: Tensor | None, vocab_size: int) -> None:
    if ids is None and valid is None:
        return
    if ids is None or valid is None:
        raise ValueError("ids and ids_valid go together: give both or neither")
    if ids.dim() != 2 or ids.shape[:1] != logits.shape[:1] or ids.dtype != torch.int64:
        raise ValueError(
            f"expected int64 ids [T, S] for logits [T, V_local] = {tuple(logits.shape)}, "
            f"got {ids.dtype} {tuple(ids.shape)}"
        )
    if valid.shape != ids.shape or valid.dtype != torch.bool:
        raise ValueError(f"expected bool ids_valid {tuple(ids.shape)}, got {valid.dtype} {tuple(valid.shape)}")
    outside = valid & ((ids < 0) | (ids >= vocab_size))
    # Unused slots get a negative number each, so that two of them never look alike.
    unused = -1 - torch.arange(ids.shape[1], device=ids.device)
    in_order, slots = torch.where(valid, ids, unused).sort(dim=1)
    twice = in_order[:, 1:] == in_order[:, :-1]
    if ids.is_cuda:
        torch._assert_async(~outside.any(), f"a valid id is outside the vocabulary [0, {vocab_size})")
        torch._assert_async(~twice.any(), "a valid id stands twice in its row")
    elif bool(outside.any()):
        row, slot = outside.nonzero()[0].tolist()
        raise ValueError(
            f"id {int(ids[row, slot])} in row {row}, slot {slot} is outside the vocabulary [0, {vocab_size}); "
            "mark the slot as unused in ids_valid"
        )
    elif bool(twice.any()):
        row, position = twice.nonzero()[0].tolist()
        first, second = sorted(slots[row, position : position + 2].tolist())
        raise ValueError(
            f"id {int(ids[row, first])} stands twice in row {row}, slots {first} and {second}; "
            "keep one of the slots in ids_valid"
        )


def shard_topk(logits: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the shard's ``width`` largest logits ``[T, width]`` in ``dtype`` and their indices.

    Of equal logits it takes the first ones, and they stand by rising place; the result is not sorted by value. A shard
    with fewer entries than ``width`` fills up with -inf behind them.
    """
    rows, shard_size = logits.shape
    count = min(width, shard_size)
    values = torch.full((rows, width), -torch.inf, dtype=dtype, device=logits.device)
    places = torch.zeros(rows, width, dtype=torch.int64, device=logits.device)
    if count:
        # torch.topk may take any of several equal entries, so its values are known and its indices are not. The second
        # search runs on a score without ties: above the threshold, then at it, then below, the lower place first.
        threshold = logits.topk(count, dim=1).values[:, -1:]
        score = (logits >= threshold).int().add_(logits > threshold).mul_(shard_size)
        score.sub_(torch.arange(shard_size, dtype=torch.int32, device=logits.device))
        places[:, :count] = score.topk(count, dim=1).indices
        values[:, :count] = logits.gather(1, places[:, :count]).to(dtype)
    return values, places


def _gather(
    values: Tensor, ids: Tensor, total: Tensor, temperature: float, group: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the candidates of all shards ``[T, shards * width]`` and their ids, the rows' maximum and sum ``[T]``."""
    width, integer = values.shape[1], torch.int64 if values.dtype == torch.float64 else torch.int32
    # The ids travel as the bits of floats: one collective, and exact for every vocabulary.
    shard_candidates = torch.cat([values, ids.to(integer).view(values.dtype), total[:, None]], dim=1)
    parts = shard_candidates.new_empty(group.size() * len(shard_candidates), shard_candidates.shape[1])
    dist.all_gather_into_tensor(parts, shard_candidates, group=group)
    shard_values, shard_ids, totals = parts.view(group.size(), *shard_candidates.shape).split([width, width, 1], dim=2)
    maxima = shard_values.amax(2)
    maximum = maxima.amax(0)
    total = (totals.squeeze(2) * maxima.sub(maximum).div_(temperature).exp_()).sum(0)
    all_ids = shard_ids.transpose(0, 1).flatten(1).view(integer).long()
    return shard_values.transpose(0, 1).flatten(1), all_ids, maximum, total


def keep_only_(logits: Tensor, ids: Tensor, counts: Tensor, first: int, shard_size: int) -> Tensor:
    """Cut in place; returns ``logits [n, W]``. Besides it, memory for a few numbers an allowed id.

    Nothing waits for a device. ``ids [N]`` are int32 global ids on the device of the logits, row by row;
    ``counts [n]``, int32 on the CPU, how many of them each row has (0: the whole vocabulary).
    """
    rows, _ = set_rows(ids, counts)
    local = ids - first
    places = local.clamp(0, max(shard_size - 1, 0)).long().add_(rows * logits.shape[1])
    flat = logits.view(-1)
    # An id of another shard stands for a place that may be another's: -inf there changes nothing under a maximum.
    values = flat[places].masked_fill_((local < 0) | (local >= shard_size), -torch.inf)
    # On the CPU half the time of masked_fill_ with a mask of rows.
    logits.index_fill_(0, _to_device(logits, counts.nonzero()[:, 0]), -torch.inf)
    flat.scatter_reduce_(0, places, values, "amax")
    return logits


def keep_only(logits: Tensor, ids: Tensor, counts: Tensor, first: int, shard_size: int) -> Tensor:
    """``keep_only_`` with gradient, as a new tensor; what was cut gets gradient 0."""
    rows, has_set = set_rows(ids, counts)
    local = ids.long() - first
    here = (local >= 0) & (local < shard_size)
    allowed = ~has_set[:, None].expand_as(logits).clone()
    allowed[rows[here], local[here]] = True
    return torch.where(allowed, logits, -torch.inf)


def set_rows(ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row of each id ``[N]``, and a mask of the rows with a sampling mask ``[n]``."""
    counts = _to_device(ids, counts)
    return torch.repeat_interleave(counts.long(), output_size=len(ids)), counts > 0


def _to_device(other: Tensor, values: Tensor) -> Tensor:
    """``values`` of the CPU where ``other`` is; nothing waits."""
    return values.pin_memory().to(other.device, non_blocking=True) if other.is_cuda else values
