"""Statistics of an output layer from the hidden states, without its logits in memory: for any loss.

Forward goes through the rows in chunks: logits by one GEMM, ``row_kernels.row_statistics``, and then one all-gather of
all rows, 4 (4 + K) bytes a row (8 k more with the policy's own Top-k). Backward computes the logits of a chunk
again and overwrites them with their gradient. Four GEMMs in all. Saved are the arguments and O(T) numbers; one chunk of
logits in float32 is in memory at a time.

``head.loss`` saves the fourth GEMM where the loss of a token depends on that token alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatron_dppo.head.checks import check_ids, check_sets
from megatron_dppo.head.gradient import HeadGradient, checked_main_grad, mark_added
from megatron_dppo.head.row_plan import RowChunk, RowPlan, Rows, chunk_size
from megatron_dppo.head.rows import RowTotals, SlotGradient, VocabShard, gather_shards, merge
from megatron_dppo.head.vocab_topk import HeadStatistics, shard_topk
from megatron_dppo.types import NO_NEEDS, LossInputs, LossNeeds, SamplingMask, TokenTargets

_SHARED_COLUMNS = sorted({f.name for f in fields(LossInputs)} & {f.name for f in fields(TokenTargets)})
"""Columns that a loss gets as the row has them."""


def candidates(logits: Tensor, width: int, first: int) -> Tensor:
    """Return the shard's largest logits and, as the bits of floats, their global ids. Shape [n, 2 * width]."""
    values, places = shard_topk(logits, width, logits.dtype)
    # One collective for both, and exact for every vocabulary.
    ids = (places + first).to(torch.int64 if logits.dtype == torch.float64 else torch.int32)
    return torch.cat([values, ids.view(logits.dtype)], 1)


def merge_candidates(parts: Tensor, k: int, totals: RowTotals, temperature: float) -> tuple[Tensor, Tensor]:
    """Merge ``[ranks, n, 2 * width]`` to the k largest: log-probabilities and int64 ids, [n, k] each."""
    shard_values, shard_ids = parts.transpose(0, 1).chunk(2, dim=2)
    values, ids = shard_values.flatten(1), shard_ids.flatten(1)
    # Equal values stand by rising id already, and what fills up a short shard stands after every entry.
    order = values.argsort(dim=1, descending=True, stable=True)[:, :k]
    integer = torch.int64 if ids.dtype == torch.float64 else torch.int32
    logprobs = (values.gather(1, order) - totals.maximum[:, None]) / temperature - totals.total.log()[:, None]
    return logprobs, ids.view(integer).long().gather(1, order)


def vocab_parallel_head_stats(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    group: ProcessGroup | None,
    vocab_size: int,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    ids: Tensor | None = None,
    ids_valid: Tensor | None = None,
    sampling_mask: SamplingMask | None = None,
    topk: int = 0,
    needs: LossNeeds = NO_NEEDS,
    plan: RowPlan | None = None,
    chunk_tokens: int | None = None,
    accumulate_main_grad: bool = False,
    round_weight_gradient: bool = True,
) -> HeadStatistics:
    """Log-probabilities, entropy and Top-K of ``softmax((hidden @ weight.T + bias) / temperature)`` over the group.

    The arguments, their checks and errors are those of ``dppo_head_loss``, with these differences. The gradient of
    ``hidden`` is this shard's part: the region that brought it to all ranks sums it. ``weight`` must not be changed
    before backward. Of a row of ``ids [T, K]`` (int64, global) the valid ones are distinct, and the label may be one of
    them; what stands in a slot with ``ids_valid`` False is ignored. The ``topk`` most probable ids are found too; ties
    go to the lower id. ``accumulate_main_grad`` adds the weight's gradient to ``weight.main_grad`` in backward, as
    Megatron's ``gradient_accumulation_fusion`` does; ``weight.grad`` then gets zeros.

    A row whose logits are all -inf has no distribution and gives NaN.

    Long because the docstring states the contract of every argument; the body is a list of steps.
    """
    head = VocabShard.of(hidden, weight, bias, group, vocab_size, temperature)
    rows = Rows.of(hidden, plan)
    check_ids(len(hidden), labels, ids, ids_valid, vocab_size, None if plan is None else plan.rows)
    if not 0 <= topk <= vocab_size:
        raise ValueError(f"topk must be from 0 to vocab_size = {vocab_size}, got {topk}")
    if sampling_mask is not None and plan is not None:
        sampling_mask = sampling_mask[plan.rows if plan.on_host is None else plan.on_host]
    check_sets(sampling_mask, rows.take(labels), vocab_size)
    main_grad = checked_main_grad(weight, accumulate_main_grad)
    size = chunk_size(chunk_tokens, rows, weight)
    call = _Call(head, rows, weight, main_grad, sampling_mask, topk, needs, size, round_weight_gradient)
    # Tensors with a gradient are arguments of their own: autograd does not look into ``call``.
    apply: Callable[..., tuple[Any, ...]] = _HeadStatistics.apply
    return HeadStatistics(*apply(hidden, weight, bias, labels, ids, ids_valid, call))


def loss_inputs(targets: TokenTargets, statistics: HeadStatistics, vocab_size: int) -> LossInputs:
    """Build the inputs of a loss from the statistics at ``targets.rollout_topk_ids[:, :K]``, all slots but the label's.

    The last slot is the label, so its log-probability is that of the label, without gradient.
    """
    topk_logprobs = None
    if statistics.id_logprobs is not None:
        # Slot K is the label's. Its gradient already flows through ``logprobs``.
        topk_logprobs = torch.cat([statistics.id_logprobs, statistics.logprobs.detach()[:, None]], 1)
    columns: dict[str, Any] = {name: getattr(targets, name) for name in _SHARED_COLUMNS}
    return LossInputs(
        logprobs=statistics.logprobs,
        entropy=statistics.entropy,
        topk_logprobs=topk_logprobs,
        topk_valid=None if targets.rollout_topk_ids is None else targets.rollout_topk_ids >= 0,
        topk_other_logprob=statistics.other_logprob,
        topk_other_square=statistics.other_square,
        vocab_size=vocab_size,
        allowed_counts=None if targets.sampling_mask is None else targets.sampling_mask.counts,
        **columns,
    )


@dataclass(frozen=True)
class _Call:
    """Arguments of forward and backward besides the tensors."""

    head: VocabShard
    rows: Rows
    weight: Tensor
    """The parameter itself, for its attributes."""
    main_grad: Tensor | None
    sampling_mask: SamplingMask | None
    topk: int
    needs: LossNeeds
    chunk: int
    round_weight_gradient: bool

    def statistics_columns(self, ids: Tensor | None) -> int:
        """Return the number of columns of ``VocabShard.statistics`` for ``ids [n, K]``."""
        return 4 + self.needs.other_square + (0 if ids is None else ids.shape[1])

    def logits(self, hidden: Tensor, chunk: RowChunk, out: Tensor) -> Tensor:
        """Return the logits ``[n, W]`` of a chunk of the rows of ``hidden [T, H]``."""
        sampling_mask = None if self.sampling_mask is None else self.sampling_mask[chunk.start : chunk.stop]
        return self.head.logits(self.rows.take(hidden, chunk.start, chunk.stop), out, sampling_mask)


class _HeadStatistics(torch.autograd.Function):
    """Autograd function that saves the totals of the rows and recomputes the logits in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        ids: Tensor | None,
        ids_valid: Tensor | None,
        call: _Call,
    ) -> tuple[Tensor | None, ...]:
        rows, head = call.rows, call.head
        labels = rows.take(labels)
        ids, ids_valid = (None if x is None else rows.take(x) for x in (ids, ids_valid))
        # One collective for the statistics of all chunks and the candidates of the Top-k.
        parts, work = gather_shards(_shard_rows(hidden, labels, ids, ids_valid, call), head.group)
        if work is not None:
            work.wait()
        columns = call.statistics_columns(ids)
        totals = merge(parts[..., :columns], labels, ids, ids_valid, head.temperature)
        top = merge_candidates(parts[..., columns:], call.topk, totals, head.temperature) if call.topk else (None,) * 2
        # Backward reads the ids only for a gradient at the slots.
        saved_ids = (ids, ids_valid) if call.needs.slot_gradient else (None, None)
        ctx.save_for_backward(hidden, weight, labels, totals.maximum, totals.total, totals.entropy, *saved_ids)
        ctx.call = call
        # The gradient of an unused output stays None; zeros would take the more expensive path of an entropy gradient.
        ctx.set_materialize_grads(False)
        # All but maximum and total.
        outputs = tuple(None if x is None else rows.spread(x) for x in (*totals[2:], *top))
        differentiable = (True, call.needs.entropy_gradient, call.needs.slot_gradient, False, False, False, False)
        constants = (x for x, moves in zip(outputs, differentiable, strict=True) if not moves)
        ctx.mark_non_differentiable(*(x for x in constants if x is not None))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
        grad_ids: Tensor | None,
        *_: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        hidden, _weight, labels, maximum, total, entropy, ids, ids_valid = ctx.saved_tensors
        call: _Call = ctx.call
        given = (grad_logprobs, grad_entropy, grad_ids)
        if all(x is None for x in given):
            return (None,) * 7
        rows = call.rows
        head = call.head
        stop = rows.num_gradient
        grad_logprobs, grad_entropy, grad_ids = (None if x is None else rows.take(x, 0, stop) for x in given)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(total[:stop])
        needed = ctx.needs_input_grad[:3]
        rounds = call.round_weight_gradient
        gradient = HeadGradient(head, rows, hidden, needed, call.chunk, call.main_grad, round_weight_gradient=rounds)
        buffer = head.new_logits(min(call.chunk, stop))
        # log p(label), the third field, is not read by the gradient; any [n] tensor will do.
        totals = RowTotals(maximum, total, total, entropy, None, None)
        local_labels = head.local(labels)
        local_ids = None if grad_ids is None else head.local(ids, ids_valid)
        # The logits of a chunk are computed again, and their gradient is written over them.
        for chunk in rows.chunks(call.chunk, stop):
            part = slice(chunk.start, chunk.stop)
            logits = call.logits(hidden, chunk, buffer)
            dlogits = head.gradient(
                logits,
                local_labels[part],
                totals.select(part),
                grad_logprobs[part],
                None if grad_entropy is None else grad_entropy[part],
                gradient.next_output(logits),
                slots=SlotGradient.select(local_ids, grad_ids, part),
            )
            gradient.add(dlogits)
        grad_hidden, grad_weight, grad_bias = gradient.result()
        if gradient.in_main_grad:
            grad_weight = mark_added(call.weight)
        if grad_hidden is not None:
            grad_hidden = rows.spread(grad_hidden)
        # No gradient for labels, ids, ids_valid and call.
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _shard_rows(hidden: Tensor, labels: Tensor, ids: Tensor | None, valid: Tensor | None, call: _Call) -> Tensor:
    """Return the columns that this shard sends for each row, ``[R, 4 + K + 2 k]``."""
    head = call.head
    # Shards are padded to equal size, so every rank sends as many candidates.
    width = min(call.topk, len(head.weight))
    columns = call.statistics_columns(ids)
    shard_rows = torch.empty(call.rows.count, columns + 2 * width, dtype=head.dtype, device=hidden.device)
    local_labels = head.local(labels)
    local_ids = None if ids is None else head.local(ids, valid)
    buffer = head.new_logits(min(call.chunk, call.rows.count))
    for chunk in call.rows.chunks(call.chunk):
        part = slice(chunk.start, chunk.stop)
        logits = call.logits(hidden, chunk, buffer)
        some_ids = None if local_ids is None else local_ids[part]
        shard_rows[part, :columns] = head.statistics(
            logits, local_labels[part], some_ids, squares=call.needs.other_square
        )
        if width:
            # Without padding: a padded entry must not become one of the Top-k.
            shard_rows[part, columns:] = candidates(logits[:, : head.shard_size], width, head.first)
    return shard_rows
