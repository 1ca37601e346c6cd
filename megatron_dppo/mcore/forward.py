"""Forward and backward passes of packed micro-batches with Megatron's pipeline schedules."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import TypeVar

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module

from megatron_dppo.head.teacher import TeacherTargets
from megatron_dppo.losses import Objective
from megatron_dppo.mcore.head import HAS_OUTPUT_PROCESSOR, OutputHead, hidden_states_only
from megatron_dppo.mcore.layer_noise import NoiseFactory
from megatron_dppo.mcore.row import MicroBatchRow, RowRecord, record_row
from megatron_dppo.types import Metric, MicroBatch

_ResultT = TypeVar("_ResultT")
_LossFunction = Callable[[MicroBatchRow, Tensor], tuple[Tensor, Tensor, _ResultT]]
"""Returns the loss, the token count and a result of a row's hidden states."""


def forward_backward(
    chunks: Sequence[Module],
    batches: Sequence[MicroBatch],
    head: OutputHead,
    objective: Objective,
    cp_group: ProcessGroup | None = None,
    teacher_targets: Sequence[TeacherTargets] = (),
    records: list[RowRecord] | None = None,
    noise: NoiseFactory | None = None,
    *,
    reduces: bool = True,
) -> list[Mapping[str, Metric]]:
    """Accumulate the gradients of all micro-batches with Megatron's schedule.

    Returns the metrics of each micro-batch on the last pipeline stage, else an empty list. Megatron sums the losses,
    sums the token counts over micro-batches and over data- and context-parallel ranks, and divides the gradients once
    by the global count (``calculate_per_token_loss``).

    ``batches`` must be equally many on every rank. ``teacher_targets`` are one for each; they add the divergence from
    the teacher to the loss. ``records`` receives the tokens of each micro-batch on the last stage. ``reduces = False``
    leaves this rank's sum in the gradient buffers, for ``Optimizer.reduce_sums``.
    """

    def loss_function(row: MicroBatchRow, hidden: Tensor) -> tuple[Tensor, Tensor, Mapping[str, Metric]]:
        output = head.loss(hidden, row, objective)
        if records is not None:
            records.append(record_row(output, row))
        # Three values make Megatron treat the second as this micro-batch's token count; it must be an int tensor.
        return output.loss_sum, output.num_tokens.to(torch.int), output.metrics

    # The teacher's divergence has a gradient in every token of the loss, also where the advantage is zero.
    make_row = _row_factory(chunks, cp_group, objective.skips_zero_advantage and not teacher_targets, noise)
    return _run_schedule(
        chunks,
        batches,
        make_row,
        loss_function,
        forward_only=False,
        reduces=reduces,
        teacher_targets=teacher_targets,
    )


@torch.no_grad()
def forward_logprobs(
    chunks: Sequence[Module], batches: Sequence[MicroBatch], head: OutputHead, cp_group: ProcessGroup | None = None
) -> list[Tensor]:
    """Return the log-probabilities ``[T]`` of the labels of each micro-batch, 0 outside the loss mask."""
    return forward_hidden_states(chunks, batches, lambda row, hidden: head.statistics(hidden, row).logprobs, cp_group)


@torch.no_grad()
def forward_hidden_states(
    chunks: Sequence[Module],
    batches: Sequence[MicroBatch],
    read: Callable[[MicroBatchRow, Tensor], _ResultT],
    cp_group: ProcessGroup | None = None,
) -> list[_ResultT]:
    """Return ``read(row, hidden states)`` of each micro-batch; an empty list on all but the last pipeline stage."""

    def collect(row: MicroBatchRow, hidden: Tensor) -> tuple[Tensor, Tensor, _ResultT]:
        # Megatron collects the third value of a loss function; the loss and the token count are placeholders.
        count = torch.tensor(0, dtype=torch.int, device=hidden.device)
        return hidden.new_zeros(()), count, read(row, hidden)

    make_row = _row_factory(chunks, cp_group, skips_zero_advantage=False)
    return _run_schedule(chunks, batches, make_row, collect, forward_only=True)


def _row_factory(
    chunks: Sequence[Module],
    cp_group: ProcessGroup | None,
    skips_zero_advantage: bool,
    noise: NoiseFactory | None = None,
) -> Callable[[MicroBatch, TeacherTargets | None], MicroBatchRow]:
    device = next(chunks[0].parameters()).device

    def make_row(batch: MicroBatch, teacher: TeacherTargets | None) -> MicroBatchRow:
        row = MicroBatchRow.from_batch(batch, cp_group, device, skips_zero_advantage=skips_zero_advantage, noise=noise)
        return row if teacher is None else replace(row, teacher=teacher)

    return make_row


def _forward_step(
    loss_function: _LossFunction[_ResultT], data: Iterator[MicroBatchRow], model: Module
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, _ResultT]]]:
    row = next(data)
    extra: dict[str, object] = {"output_processor": hidden_states_only} if HAS_OUTPUT_PROCESSOR else {}
    if any(isinstance(each, Float16Module) for each in (model, getattr(model, "module", None))):
        # Float16Module would convert its output to fp32: the head reads bf16 hidden states and accumulates in fp32.
        extra["fp32_output"] = False
    output = model(
        # One packed row is a batch of one; ``cu_seqlens`` in the packing parameters replaces the attention mask.
        input_ids=row.split(row.batch.tokens)[None],
        position_ids=row.split(row.batch.position_ids)[None],
        attention_mask=None,
        packed_seq_params=row.packing,
        **extra,
    )
    return output, partial(loss_function, row)


def _run_schedule(
    chunks: Sequence[Module],
    batches: Sequence[MicroBatch],
    make_row: Callable[[MicroBatch, TeacherTargets | None], MicroBatchRow],
    loss_function: _LossFunction[_ResultT],
    *,
    forward_only: bool,
    reduces: bool = True,
    teacher_targets: Sequence[TeacherTargets] = (),
) -> list[_ResultT]:
    if not batches:
        raise ValueError("Expected at least one micro-batch on every rank, got none. Fix: pass an empty one.")
    # With virtual pipeline stages each model chunk reads the micro-batches from an iterator of its own.
    iterators = [map(make_row, batches, teacher_targets or repeat(None)) for _ in chunks]
    is_single = len(chunks) == 1
    # The whole row's length: Megatron divides by the context-parallel size itself.
    tokens = batches[0].tokens.numel()
    config = get_model_config(chunks[0])
    finalize = config.finalize_model_grads_func
    try:
        # Megatron 0.16.1 skips this hook in forward-only runs. Unset it, so that no version reduces gradients here.
        if forward_only or not reduces:
            config.finalize_model_grads_func = None
        return get_forward_backward_func()(
            forward_step_func=partial(_forward_step, loss_function),
            data_iterator=iterators[0] if is_single else iterators,
            model=chunks[0] if is_single else list(chunks),
            num_microbatches=len(batches),
            seq_length=tokens,
            micro_batch_size=1,
            decoder_seq_length=tokens,
            forward_only=forward_only,
        )
    finally:
        config.finalize_model_grads_func = finalize
