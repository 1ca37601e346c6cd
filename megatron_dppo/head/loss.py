"""A token-level loss straight from the hidden states: its gradient is made in forward, in three GEMMs.

For each chunk of rows: the logits; the shard's statistics; one all-gather of them, 4 (4 + K) bytes a row (on CUDA the
GEMM of the next chunk runs meanwhile); the loss itself, differentiated in the log-probabilities and the entropy of the
chunk; the gradient of the logits, written over them; and from it that of hidden states and weight. As the loss of a row
depends on that row alone, nothing is needed of the others, and nothing of the size of the vocabulary is kept. Backward
multiplies by the gradient of the one number that came out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dppo.head.checks import check_ids
from megatron_dppo.head.columns import RowColumns, looked_up_ids
from megatron_dppo.head.gradient import HeadGradient, attach_gradient, check_rest, checked_main_grad
from megatron_dppo.head.row_plan import RowChunk, RowPlan, Rows, chunk_size, chunks_in_flight
from megatron_dppo.head.rows import RowTotals, SlotGradient, VocabShard, gather_shards, merge
from megatron_dppo.head.stats import loss_inputs
from megatron_dppo.head.sums import joined, merge_narrow, narrow, reduce_slots
from megatron_dppo.head.teacher import COLUMNS, Distillation, TeacherTargets, add_, add_distillation
from megatron_dppo.head.vocab_topk import HeadStatistics
from megatron_dppo.types import NO_NEEDS, LossInputs, LossNeeds, LossOutput, TokenTargets

LossFunction = Callable[[LossInputs], LossOutput]


def dppo_head_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: TokenTargets,
    loss: LossFunction,
    *,
    group: ProcessGroup | None,
    vocab_size: int,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    needs: LossNeeds = NO_NEEDS,
    teacher: TeacherTargets | None = None,
    plan: RowPlan | None = None,
    chunk_tokens: int | None = None,
    accumulate_main_grad: bool = False,
    grad_scale: Tensor | None = None,
    round_weight_gradient: bool = True,
) -> LossOutput:
    """Compute ``loss`` of ``softmax((hidden @ weight.T + bias) / temperature)`` over the group, with its gradients.

    Example: one process, a vocabulary of three. The gradient is the mean of the weight's rows less the label's row.
        >>> from megatron_dppo.losses import supervised_loss as loss
        >>> hidden = torch.tensor([[1.0, 0.0]], requires_grad=True)
        >>> weight = torch.tensor([[0.5, 1.0], [0.25, 1.0], [0.25, 1.0]]).log()
        >>> targets = TokenTargets(labels=torch.tensor([0]), advantages=torch.ones(1), loss_mask=torch.tensor([True]))
        >>> dppo_head_loss(hidden, weight, targets, loss, group=None, vocab_size=3).loss_sum.backward(); hidden.grad
        tensor([[-0.3466,  0.0000]])

    Args:
        hidden: Hidden states, the same on all ranks. Shape [T, H], float32, float64, bfloat16 or float16.
        weight: This rank's shard of the output layer. Shape [V_local, H], in the dtype of ``hidden``.
        group: Vocabulary-parallel group. None: not sharded.
        vocab_size: V without padding.
        temperature: Divides the logits.
        bias: Shape [V_local]. None: the layer has no bias.
        targets: Targets of the T rows, the same on all ranks, without ``sequence_ids``. The softmax is over their
            ``sampling_mask``.
        loss: Sum over tokens whose terms depend on that token alone; called on some rows at a time on all ranks.
        needs: Statistics that the loss gets besides the usual ones; ``topk_sums`` if several shards exchange them.
        teacher: Teacher; the divergence from it is added to the loss. The ``plan`` must then be made without
            advantages.
        plan: Rows with loss. None means all. A row that it leaves out has no loss, whatever the mask says.
        chunk_tokens: Rows in a chunk; None = ``default_chunk_tokens``.
        accumulate_main_grad: Add the weight's gradient to ``weight.main_grad`` in forward (Megatron's gradient
            accumulation fusion: in backward). ``weight.grad`` gets zeros; ``loss_sum`` must get ``grad_scale``.
        grad_scale: Scalar, the gradient that ``loss_sum`` will get; all gradients include it. None means 1.
        round_weight_gradient: On a CPU with fast bf16 products, round the weight's gradient of a part of the rows to
            bf16 before it is added in fp32. No effect elsewhere.

    Returns:
        The loss of all rows: sums over the chunks, ``keep_mask [T]`` (False in rows outside the plan), and metrics
        added up. Its ``loss_sum`` can be differentiated once.

    Raises:
        ValueError: Before any collective: ``targets.sequence_ids`` is given, ``needs`` contradict each other, shapes,
            dtypes or devices do not fit, the shards cannot hold the vocabulary, the temperature is not positive, a
            label or a valid id is outside the vocabulary (on CUDA a device-side assertion, as for the next three), a
            valid id stands twice in its row, a label is not in its Top-K set, or outside its sampling mask, or
            ``main_grad`` does not fit. After them: the loss has a gradient in a row without one in the plan. In
            backward: a second.

    Long because the docstring states the contract of every argument; the body is a list of steps.
    """
    # Checks first, before any collective: a rank that raised later would leave the others waiting.
    if needs.topk_sums is not None and needs.slot_gradient:
        raise ValueError("needs.slot_gradient needs the Top-K slots, needs.topk_sums exchanges their sums; choose one")
    head = VocabShard.of(hidden, weight, bias, group, vocab_size, temperature)
    check_ids(len(hidden), targets.labels, *looked_up_ids(targets), vocab_size, None if plan is None else plan.rows)
    columns = RowColumns.of(head, targets, plan, vocab_size)
    rows = Rows.of(hidden, plan)
    distillation = None if teacher is None else Distillation(teacher, head, rows, vocab_size, targets)
    main_grad = checked_main_grad(weight, accumulate_main_grad)
    needed = _needed(hidden), _needed(weight), _needed(bias)
    size, in_flight = _chunks(head, rows, chunk_tokens, models=1 if distillation is None else 2)
    gradient = HeadGradient(
        head, rows, hidden, needed, size, main_grad, grad_scale, round_weight_gradient=round_weight_gradient
    )
    run = _HeadCall(head, rows, hidden.detach(), columns, loss, needs, vocab_size, in_flight, gradient, distillation)
    # One pass, chunk by chunk: statistics, loss, gradient.
    output = joined([_finish(run, pending) for pending in _pending(run)], rows)
    # Backward only scales what the pass has accumulated.
    return replace(output, loss_sum=attach_gradient(output.loss_sum, hidden, weight, bias, gradient))


def _chunks(head: VocabShard, rows: Rows, chunk_tokens: int | None, models: int) -> tuple[int, int]:
    """Return the rows in a chunk, and the number of chunks whose logits are in memory at the same time."""
    in_flight = chunks_in_flight(head.weight.device, head.group)
    ranks = 1 if head.group is None else head.group.size()
    # On CUDA the chunks in flight share the memory budget, on the CPU the ranks of the machine do. A teacher doubles
    # both.
    return chunk_size(chunk_tokens, rows, head.weight, models * in_flight, models * ranks), in_flight


def _needed(tensor: Tensor | None) -> bool:
    return torch.is_grad_enabled() and tensor is not None and tensor.requires_grad


@dataclass(frozen=True)
class _HeadCall:
    """Arguments and state of one call."""

    head: VocabShard
    rows: Rows
    hidden: Tensor
    columns: RowColumns
    loss: LossFunction
    needs: LossNeeds
    vocab_size: int
    in_flight: int
    """Chunks whose logits are in memory at the same time."""
    gradient: HeadGradient
    distillation: Distillation | None

    @property
    def exchanges_sums(self) -> bool:
        """True if the shards exchange sums over the slots. A single shard has all slots anyway."""
        return self.needs.topk_sums is not None and self.head.group is not None and self.columns.ids is not None

    @property
    def overwrites(self) -> bool:
        """True if exponentials replace the logits.

        On the CPU recomputing them costs more than memory, and without an entropy term the gradient needs nothing else.
        """
        rereads = self.needs.entropy_gradient or self.distillation is not None
        return self.gradient.wanted and not rereads and not self.hidden.is_cuda


@dataclass(frozen=True)
class _Pending:
    """A chunk whose statistics are being gathered."""

    chunk: RowChunk
    columns: RowColumns
    logits: Tensor
    shard_statistics: Tensor
    """Row statistics of this shard. Exponentials may have replaced the logits."""
    parts: Tensor
    work: dist.Work | None
    teacher_logits: Tensor | None


@torch.no_grad()
def _pending(run: _HeadCall) -> Iterator[_Pending]:
    """Yield the chunks in order, each after the GEMM of the next; one empty chunk without rows, for the collectives."""
    chunks = list(run.rows.chunks(run.gradient.chunk)) or [RowChunk(0, 0, 0)]
    number = min(run.in_flight, len(chunks))
    rows = min(run.gradient.chunk, run.rows.count)
    distillation = run.distillation
    # A buffer is used again for chunk i + number, which starts only after chunk i was yielded and finished by the
    # caller.
    buffers = [
        (run.head.new_logits(rows), None if distillation is None else distillation.new_logits(rows))
        for _ in range(number)
    ]
    started: list[_Pending] = []
    for index, chunk in enumerate(chunks):
        started.append(_start(run, chunk, *buffers[index % number]))
        if len(started) == number:
            yield started.pop(0)
    yield from started


def _start(run: _HeadCall, chunk: RowChunk, buffer: Tensor, teacher_buffer: Tensor | None) -> _Pending:
    head = run.head
    hidden = run.rows.take(run.hidden, chunk.start, chunk.stop)
    columns = run.columns.select(slice(chunk.start, chunk.stop))
    logits = head.logits(hidden, buffer, columns.targets.sampling_mask)
    squares = run.needs.other_square
    shard_statistics = head.statistics(
        logits, columns.labels, columns.local_ids, squares=squares, overwrite=run.overwrites
    )
    sent = shard_statistics
    if run.exchanges_sums and columns.ids is not None and columns.valid is not None:
        # Four numbers a row instead of 4 + K. ``_totals`` exchanges the sums over the slots later.
        sent = narrow(shard_statistics, columns.targets.labels, columns.ids, columns.valid)
    # The teacher's two numbers a row travel in the same gather.
    teacher_logits = None
    if run.distillation is not None and teacher_buffer is not None:
        teacher_logits, totals = run.distillation.start(chunk, teacher_buffer)
        sent = torch.cat([sent, totals], 1)
    return _Pending(chunk, columns, logits, shard_statistics, *gather_shards(sent, head.group), teacher_logits)


@torch.no_grad()
def _finish(run: _HeadCall, pending: _Pending) -> LossOutput:
    """Return the loss of a chunk and add its gradients to ``run.gradient``."""
    if pending.work is not None:
        # On CUDA the GEMM of the next chunk is queued by now and hides this collective.
        pending.work.wait()
    head = run.head
    columns = pending.columns
    totals, sums = _totals(run, pending)
    output, grad_logprobs, grad_entropy, grad_ids = _differentiate(run, columns.targets, totals, sums)
    # Rows with a gradient come first in the plan, so they are the first rows of a chunk.
    stop = pending.chunk.num_gradient if run.gradient.wanted else 0
    term = None
    if run.distillation is not None and pending.teacher_logits is not None:
        term = run.distillation.finish(
            pending.logits,
            totals,
            pending.teacher_logits,
            pending.parts[..., -COLUMNS:],
            columns.targets,
            scale=run.gradient.scale,
            differentiates=run.gradient.wanted,
        )
        output = add_distillation(output, term.loss_sum, term.metrics)
    if run.gradient.wanted:
        check_rest(stop, grad_logprobs, grad_entropy, grad_ids)
    if stop:
        part = slice(0, stop)
        # Written over the logits. From it follow the gradients of hidden states and weight, and then it is dropped.
        dlogits = head.gradient(
            pending.logits[part],
            columns.labels[part],
            totals.select(part),
            grad_logprobs[part],
            None if grad_entropy is None else grad_entropy[part],
            run.gradient.next_output(pending.logits[part]),
            # The shard's maximum, to which the exponentials in place of the logits are relative.
            pending.shard_statistics[part, 0] if run.overwrites else None,
            SlotGradient.select(columns.local_ids, grad_ids, part),
        )
        if term is not None and term.gradient is not None:
            dlogits = add_(dlogits, term.gradient)
        run.gradient.add(dlogits)
    return output


def _totals(run: _HeadCall, pending: _Pending) -> tuple[RowTotals, Tensor | None]:
    """Return the totals of the rows, and ``losses.topk_sums`` of all slots if sums are exchanged instead of slots."""
    targets, _, ids, valid, local_ids = pending.columns
    head = run.head
    # The teacher's columns come last.
    parts = pending.parts if run.distillation is None else pending.parts[..., :-COLUMNS]
    if not run.exchanges_sums:
        return merge(parts, targets.labels, ids, valid, head.temperature), None
    topk_ids = targets.rollout_topk_ids
    rollout_logprobs = targets.rollout_topk_logprobs
    assert local_ids is not None and topk_ids is not None and rollout_logprobs is not None
    slot_sums = run.needs.topk_sums
    assert head.group is not None and slot_sums is not None
    totals = merge_narrow(parts, head.temperature)
    sums, other, square = reduce_slots(
        pending.shard_statistics,
        local_ids >= 0,
        rollout_logprobs[:, :-1],
        totals,
        head.temperature,
        head.group,
        slot_sums,
    )
    # The label's own slot. Its log-probability is known everywhere after the gather, so no shard has to own it.
    last = slot_sums(totals.logprobs[:, None], rollout_logprobs[:, -1:], topk_ids[:, -1:] >= 0)
    return totals._replace(other_logprob=other, other_square=square), sums + last.to(sums.dtype)


def _differentiate(
    run: _HeadCall, targets: TokenTargets, totals: RowTotals, sums: Tensor | None
) -> tuple[LossOutput, Tensor, Tensor | None, Tensor | None]:
    """Return the loss of some rows, and its derivatives by log-probabilities, entropies and id log-probabilities."""
    needs = run.needs
    # The loss is differentiated in n log-probabilities (and entropies, slots), not in the logits: these few
    # derivatives are all that ``VocabShard.gradient`` needs to form the gradient of the logits.
    logprobs = totals.logprobs.detach().requires_grad_(run.gradient.wanted)
    entropy = totals.entropy.detach().requires_grad_(run.gradient.wanted and needs.entropy_gradient)
    ids = None if totals.id_logprobs is None else totals.id_logprobs.detach()
    if ids is not None:
        ids.requires_grad_(run.gradient.wanted and needs.slot_gradient)
    statistics = HeadStatistics(logprobs, entropy, ids, totals.other_logprob, totals.other_square)
    with torch.set_grad_enabled(run.gradient.wanted):
        output = run.loss(replace(loss_inputs(targets, statistics, run.vocab_size), topk_sums=sums))
    # A loss may ignore a column, or return a constant (a batch without advantages): both have gradient 0.
    leaves = (logprobs, entropy, ids)
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    zeros = torch.zeros_like(totals.logprobs)
    if not wanted or not output.loss_sum.requires_grad:
        return output, zeros, None, None
    gradients = iter(torch.autograd.grad(output.loss_sum, wanted, run.gradient.scale, allow_unused=True))
    by_leaf = [next(gradients) if leaf is not None and leaf.requires_grad else None for leaf in leaves]
    detached = replace(output, loss_sum=output.loss_sum.detach())
    return detached, zeros if by_leaf[0] is None else by_leaf[0], by_leaf[1], by_leaf[2]
