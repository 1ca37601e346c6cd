"""Packed micro-batches through Megatron's own schedule: forward, loss, backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_dppo.mcore.attention import PackedRow
from megatron_dppo.parallel.vocab_logprobs import vocab_parallel_logprobs_and_entropy
from megatron_dppo.types import LossInputs, LossOutput, Metric, MicroBatch

LossFunction = Callable[[LossInputs], LossOutput]


class TokenStatistics:
    """Logits of a micro-batch to per-token statistics, over the vocabulary-parallel group.

    Args:
        tp_group: the group that the vocabulary is sharded over.
        vocab_size: entries of the vocabulary without padding.
        temperature: the rollout's temperature; it divides the logits.
    """

    def __init__(self, tp_group: dist.ProcessGroup | None, vocab_size: int, temperature: float) -> None:
        self._tp_group, self._vocab_size, self._temperature = tp_group, vocab_size, temperature

    def __call__(self, logits: Tensor, batch: MicroBatch) -> LossInputs:
        """``logits [1, T, V/tp]`` of the packed row to the inputs of a loss."""
        logprobs, entropy = vocab_parallel_logprobs_and_entropy(
            logits.squeeze(0),
            batch.labels,
            group=self._tp_group,
            vocab_size=self._vocab_size,
            temperature=self._temperature,
        )
        return LossInputs(
            logprobs=logprobs,
            entropy=entropy.detach(),
            advantages=batch.advantages,
            loss_mask=batch.loss_mask,
            rollout_logprobs=batch.rollout_logprobs,
            sequence_ids=batch.sequence_ids,
        )


def forward_backward(
    chunks: Sequence[Any],
    batches: Sequence[MicroBatch],
    statistics: TokenStatistics,
    loss: LossFunction,
) -> list[Mapping[str, Metric]]:
    """Accumulate the gradients of all micro-batches by Megatron's schedule.

    Megatron sums the losses, sums the token counts over micro-batches and data-parallel ranks, and divides the
    gradients once by the global count (``calculate_per_token_loss``).

    Returns:
        The metrics of each micro-batch; empty on all but the last pipeline stage.
    """

    def loss_function(batch: MicroBatch, logits: Tensor) -> tuple[Tensor, Tensor, Mapping[str, Metric]]:
        output = loss(statistics(logits, batch))
        return output.loss_sum, output.num_tokens.to(torch.int), output.metrics

    return _run_schedule(chunks, batches, loss_function, forward_only=False)


@torch.no_grad()
def forward_logprobs(
    chunks: Sequence[Any], batches: Sequence[MicroBatch], statistics: TokenStatistics
) -> list[tuple[Tensor, Tensor]]:
    """Log-probabilities and entropy ``[T]`` of each micro-batch; empty on all but the last pipeline stage."""

    def collect(batch: MicroBatch, logits: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor | None]]:
        inputs = statistics(logits, batch)
        count = torch.tensor(0, dtype=torch.int, device=logits.device)
        return logits.new_zeros(()), count, (inputs.logprobs, inputs.entropy)

    return _run_schedule(chunks, batches, collect, forward_only=True)


def _forward_step(loss_function: Callable[..., Any], data: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Any]:
    batch = next(data)
    output = model(
        input_ids=batch.tokens[None],
        position_ids=batch.position_ids[None],
        attention_mask=None,
        packed_seq_params=PackedRow.of(batch),
    )
    return output, partial(loss_function, batch)


def _run_schedule(
    chunks: Sequence[Any], batches: Sequence[MicroBatch], loss_function: Callable[..., Any], *, forward_only: bool
) -> list[Any]:
    if not batches:
        raise ValueError("the schedule needs at least one micro-batch on every rank (an empty one will do)")
    device = next(chunks[0].parameters()).device
    moved = [batch.to(device) for batch in batches]
    iterators = [iter(moved) for _ in chunks]
    single = len(chunks) == 1
    tokens = moved[0].tokens.numel()
    config = get_model_config(chunks[0])
    finalize = config.finalize_model_grads_func
    try:
        if forward_only:
            config.finalize_model_grads_func = None
        return get_forward_backward_func()(
            forward_step_func=partial(_forward_step, loss_function),
            data_iterator=iterators[0] if single else iterators,
            model=chunks[0] if single else list(chunks),
            num_microbatches=len(moved),
            seq_length=tokens,
            micro_batch_size=1,
            decoder_seq_length=tokens,
            forward_only=forward_only,
        )
    finally:
        config.finalize_model_grads_func = finalize
