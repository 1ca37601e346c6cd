"""Packed micro-batches through Megatron's own schedule: forward, loss, backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dppo.mcore.attention import PackedRow
from megatron_dppo.parallel.context import ContextShard
from megatron_dppo.parallel.vocab_topk import VocabStatistics, vocab_parallel_statistics
from megatron_dppo.types import LossInputs, LossOutput, Metric, MicroBatch

LossFunction = Callable[[LossInputs], LossOutput]


@dataclass(frozen=True)
class Row:
    """One micro-batch, and the share of it that this context-parallel rank computes."""

    batch: MicroBatch
    shard: ContextShard | None

    @classmethod
    def of(cls, batch: MicroBatch, cp_group: ProcessGroup | None, device: torch.device) -> Row:
        """Move to ``device``; the share is found before that, on the host."""
        shard = None if cp_group is None else ContextShard.of(batch.cu_seqlens, cp_group).to(device)
        return cls(batch.to(device), shard)

    def own(self, values: Tensor) -> Tensor:
        """``[T, ...]`` to what this rank computes."""
        return values if self.shard is None else self.shard.split(values)


class TokenStatistics:
    """Logits of a micro-batch to per-token statistics, over the vocabulary-parallel group.

    Args:
        tp_group: the group that the vocabulary is sharded over.
        vocab_size: entries of the vocabulary without padding.
        temperature: the rollout's temperature; it divides the logits.
        entropy_gradient: whether the entropy carries one; without an entropy bonus it would only cost.
    """

    def __init__(
        self, tp_group: ProcessGroup | None, vocab_size: int, temperature: float, *, entropy_gradient: bool = False
    ) -> None:
        self._tp_group, self._vocab_size, self._temperature = tp_group, vocab_size, temperature
        self._entropy_gradient = entropy_gradient

    def __call__(self, logits: Tensor, row: Row) -> LossInputs:
        """``logits [1, T, V/tp]`` of this rank's share to the inputs of a loss over the whole row."""
        batch = row.batch
        topk_ids = None if batch.rollout_topk_ids is None else batch.rollout_topk_ids.long()
        found = vocab_parallel_statistics(
            logits.squeeze(0),
            row.own(batch.labels),
            group=self._tp_group,
            vocab_size=self._vocab_size,
            temperature=self._temperature,
            ids=None if topk_ids is None else row.own(topk_ids),
        )
        if row.shard is not None:
            found = _gather_row(found, row.shard)
        return LossInputs(
            logprobs=found.logprobs,
            entropy=found.entropy if self._entropy_gradient else found.entropy.detach(),
            advantages=batch.advantages,
            loss_mask=batch.loss_mask,
            rollout_logprobs=batch.rollout_logprobs,
            topk_logprobs=found.id_logprobs,
            rollout_topk_logprobs=batch.rollout_topk_logprobs,
            topk_valid=None if topk_ids is None else topk_ids >= 0,
            topk_other_logprob=found.other_logprob,
            anchor_logprobs=batch.anchor_logprobs,
            reference_logprobs=batch.reference_logprobs,
            sequence_ids=batch.sequence_ids,
            token_weights=batch.token_weights,
        )


def _gather_row(found: VocabStatistics, shard: ContextShard) -> VocabStatistics:
    """The statistics of the whole row on every context-parallel rank, by one all-gather.

    Every rank then computes the same loss of whole sequences, and takes the gradient of its own share.
    """
    columns = [found.logprobs[:, None], found.entropy[:, None]]
    if found.id_logprobs is not None and found.other_logprob is not None:
        columns += [found.other_logprob[:, None], found.id_logprobs]
    row = shard.gather(torch.cat(columns, 1))
    if found.id_logprobs is None:
        return VocabStatistics(row[:, 0], row[:, 1], None, None)
    return VocabStatistics(row[:, 0], row[:, 1], row[:, 3:].detach(), row[:, 2].detach())


def forward_backward(
    chunks: Sequence[Any],
    batches: Sequence[MicroBatch],
    statistics: TokenStatistics,
    loss: LossFunction,
    cp_group: ProcessGroup | None = None,
) -> list[Mapping[str, Metric]]:
    """Accumulate the gradients of all micro-batches by Megatron's schedule.

    Megatron sums the losses, sums the token counts over micro-batches and ranks of data and context parallelism, and
    divides the gradients once by the global count (``calculate_per_token_loss``). Context-parallel ranks compute the
    same loss, so the first one alone counts the tokens.

    Returns:
        The metrics of each micro-batch; empty on all but the last pipeline stage.
    """
    counts = cp_group is None or cp_group.rank() == 0

    def loss_function(row: Row, logits: Tensor) -> tuple[Tensor, Tensor, Mapping[str, Metric]]:
        output = loss(statistics(logits, row))
        num_tokens = output.num_tokens.to(torch.int)
        return output.loss_sum, num_tokens if counts else torch.zeros_like(num_tokens), output.metrics

    return _run_schedule(chunks, batches, cp_group, loss_function, forward_only=False)


@torch.no_grad()
def forward_logprobs(
    chunks: Sequence[Any],
    batches: Sequence[MicroBatch],
    statistics: TokenStatistics,
    cp_group: ProcessGroup | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Log-probabilities and entropy ``[T]`` of each micro-batch; empty on all but the last pipeline stage."""

    def collect(row: Row, logits: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor | None]]:
        inputs = statistics(logits, row)
        count = torch.tensor(0, dtype=torch.int, device=logits.device)
        return logits.new_zeros(()), count, (inputs.logprobs, inputs.entropy)

    return _run_schedule(chunks, batches, cp_group, collect, forward_only=True)


def _forward_step(loss_function: Callable[..., Any], data: Iterator[Row], model: Any) -> tuple[Tensor, Any]:
    row = next(data)
    output = model(
        input_ids=row.own(row.batch.tokens)[None],
        position_ids=row.own(row.batch.position_ids)[None],
        attention_mask=None,
        packed_seq_params=PackedRow.of(row.batch, row.shard),
    )
    return output, partial(loss_function, row)


def _run_schedule(
    chunks: Sequence[Any],
    batches: Sequence[MicroBatch],
    cp_group: ProcessGroup | None,
    loss_function: Callable[..., Any],
    *,
    forward_only: bool,
) -> list[Any]:
    if not batches:
        raise ValueError("the schedule needs at least one micro-batch on every rank (an empty one will do)")
    device = next(chunks[0].parameters()).device
    rows = [Row.of(batch, cp_group, device) for batch in batches]
    iterators = [iter(rows) for _ in chunks]
    single = len(chunks) == 1
    tokens = rows[0].own(rows[0].batch.tokens).numel()
    config = get_model_config(chunks[0])
    finalize = config.finalize_model_grads_func
    try:
        if forward_only:
            config.finalize_model_grads_func = None
        return get_forward_backward_func()(
            forward_step_func=partial(_forward_step, loss_function),
            data_iterator=iterators[0] if single else iterators,
            model=chunks[0] if single else list(chunks),
            num_microbatches=len(rows),
            seq_length=tokens,
            micro_batch_size=1,
            decoder_seq_length=tokens,
            forward_only=forward_only,
        )
    finally:
        config.finalize_model_grads_func = finalize
