"""From the model's last hidden states to the loss: the fused head, and the plain output layer as its oracle.

Megatron's model would multiply by the output layer itself; here it hands out its hidden states instead, by its own hook
(``output_processor``) or, where that is missing, by an output layer that passes them through.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dppo.head.checks import check_slots
from megatron_dppo.head.loss import LossFunction, dppo_head_loss
from megatron_dppo.head.mixed_gemm import logits_into
from megatron_dppo.head.stats import HeadStatistics, loss_inputs, vocab_parallel_head_stats
from megatron_dppo.head.teacher import TeacherTargets, add_distillation
from megatron_dppo.head.vocab_logprobs import shard_range
from megatron_dppo.head.vocab_topk import keep_only, vocab_parallel_statistics, vocab_parallel_topk
from megatron_dppo.losses import SUPERVISED, Objective, no_policy_loss
from megatron_dppo.mcore.row import MicroBatchRow
from megatron_dppo.parallel.context import ContextShard
from megatron_dppo.types import NO_NEEDS, LossInputs, LossNeeds, LossOutput, Metric, SamplingMask, TokenTargets

_SUMS_PAY_FROM = 512
"""Top-K slots times shards from which their sums are exchanged instead: the gather of a chunk of 4096 rows is 8 MB
then, which takes longer than one more collective of 12 bytes a row."""
HAS_OUTPUT_PROCESSOR = "output_processor" in inspect.signature(GPTModel.forward).parameters


def hidden_states_only(*, hidden_states: Tensor, **_: Any) -> Tensor:
    """Megatron's hook for the output layer: ``[T, 1, H]`` to ``[1, T, H]``, as the logits would come."""
    return hidden_states.transpose(0, 1)


def hand_out_hidden_states(model: GPTModel) -> None:
    """Let a model without that hook return its last hidden states.

    GPTModel.forward has no ``output_processor`` before megatron-core 0.17. To be removed with those versions.
    """
    if model.post_process and not HAS_OUTPUT_PROCESSOR:
        model.output_layer.forward = _pass_through


def _pass_through(hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
    return hidden, None


class TokenLogprobs(NamedTuple):
    """What the policy says of a row of T tokens, in nats, fp32, without gradient; 0 where the row has no loss."""

    logprobs: Tensor
    """[T] of the labels, at the rollout's temperature, like all others but those that are called raw"""
    raw_logprobs: Tensor
    """[T] of the labels, at temperature 1"""
    id_logprobs: Tensor | None
    """[T, K] at the Top-K ids that the row brought; None without"""
    raw_id_logprobs: Tensor | None
    """[T, K] at the same ids, at temperature 1"""
    best_logprobs: Tensor | None
    """[T, K] of the policy's own Top-K by rank; None without"""


class OutputHead:
    """Hidden states of a micro-batch to per-token statistics or to the loss, over the vocabulary-parallel group.

    Args:
        model: the last chunk of this rank; only that of the last pipeline stage has an output layer.
        tp_group: the group that the vocabulary is sharded over.
        vocab_size: entries of the vocabulary without padding.
        temperature: the rollout's temperature; it divides the logits.
        fused: False = logits by Megatron's output layer; the oracle, at the cost of tensors of vocabulary size.
    """

    def __init__(
        self, model: GPTModel, tp_group: ProcessGroup | None, vocab_size: int, temperature: float, *, fused: bool = True
    ) -> None:
        self._model, self._fused = model, fused
        self._group = tp_group
        self._common: dict[str, Any] = {"group": tp_group, "vocab_size": vocab_size, "temperature": temperature}

    def at_temperature(self, temperature: float) -> OutputHead:
        """The same output layer at another temperature."""
        vocab_size = self._common["vocab_size"]
        return OutputHead(self._model, self._group, vocab_size, temperature, fused=self._fused)

    def loss(self, hidden: Tensor, row: MicroBatchRow, objective: Objective) -> LossOutput:
        """The loss of this rank's ``hidden [1, T, H]``.

        Context-parallel ranks either take the loss of their own tokens, or, where it needs whole sequences, all compute
        the loss of the whole row; then the first one alone counts its tokens and reports its metrics.
        """
        if self._fused and objective.by_token:
            return self._in_one_pass(hidden, row, objective.loss, self._needs(objective, row.own))
        output = objective.loss(self.statistics(hidden, row, objective))
        if row.shard is not None and row.shard.group.rank() != 0:
            # The divergence is of its own tokens: that part of the reported loss is still to come.
            left = {} if row.teacher is None else {"loss": Metric(0.0, 0.0)}
            output = replace(output, num_tokens=torch.zeros_like(output.num_tokens), metrics=left)
        if row.teacher is None:
            return output
        taught = self._in_one_pass(hidden, row, no_policy_loss, NO_NEEDS)
        return add_distillation(output, taught.loss_sum, taught.metrics)

    def _in_one_pass(self, hidden: Tensor, row: MicroBatchRow, loss: LossFunction, needs: LossNeeds) -> LossOutput:
        """A loss of single tokens, and the divergence from the teacher where there is one."""
        return dppo_head_loss(
            self._whole(hidden),
            self.weight(),
            replace(row.own, sequence_ids=None),
            loss,
            needs=needs,
            teacher=None if row.teacher is None else self._teacher_on_device(row.teacher),
            plan=row.plan,
            accumulate_main_grad=self._accumulates(),
            grad_scale=self._loss_scale(),
            **self._common,
        )

    def _teacher_on_device(self, teacher: TeacherTargets) -> TeacherTargets:
        """With the hidden states of all of the row's tokens that this rank computes, on the device."""
        hidden = teacher.hidden.to(self.weight().device, non_blocking=True)
        if self._model.config.sequence_parallel and self._group is not None:
            parts = hidden.new_empty(self._group.size() * len(hidden), hidden.shape[1])
            torch.distributed.all_gather_into_tensor(parts, hidden, group=self._group)
            hidden = parts
        return teacher._replace(hidden=hidden)

    def statistics(self, hidden: Tensor, row: MicroBatchRow, objective: Objective = SUPERVISED) -> LossInputs:
        """The inputs of a loss over the whole row, with the gradients that it needs; 0 where the row has no loss."""
        check_slots(row.batch, None)
        found = self._fused_statistics(hidden, row, objective) if self._fused else self._plain(hidden, row)
        if not objective.needs.entropy_gradient:
            found = found._replace(entropy=found.entropy.detach())
        if not objective.needs.slot_gradient and found.id_logprobs is not None:
            found = found._replace(id_logprobs=found.id_logprobs.detach())
        if row.shard is not None:
            found = _gather_row(found, row.shard)
        return loss_inputs(row.batch, found, self._common["vocab_size"])

    def token_logprobs(self, hidden: Tensor, row: MicroBatchRow) -> TokenLogprobs:
        """What engines are compared with, over the whole row."""
        found, raw = self.statistics(hidden, row), self.at_temperature(1.0).statistics(hidden, row)
        if found.topk_logprobs is None or raw.topk_logprobs is None:
            return TokenLogprobs(found.logprobs, raw.logprobs, None, None, None)
        ids, raw_ids = found.topk_logprobs[:, :-1], raw.topk_logprobs[:, :-1]
        return TokenLogprobs(found.logprobs, raw.logprobs, ids, raw_ids, self._best(hidden, row, ids.shape[1]))

    def next_token_logits(self, hidden: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden states ``[b, H]`` at ``places [b]`` of a row, and the logits ``[b, V]`` of what comes next there;
        the same on all ranks of the group."""
        rows, weight = self._whole(hidden)[places], self.weight()
        mine = logits_into(rows, weight, None, rows.new_empty(len(rows), len(weight), dtype=torch.float32))
        every = [mine]
        if self._group is not None:
            every = [torch.empty_like(mine) for _ in range(self._group.size())]
            torch.distributed.all_gather(every, mine, group=self._group)
        return rows, torch.cat(every, 1)[:, : self._common["vocab_size"]]

    def row_statistics(
        self, rows: Tensor, labels: Tensor, ids: Tensor | None, sampling_mask: SamplingMask | None
    ) -> HeadStatistics:
        """Return the statistics of hidden states ``[b, H]`` that ``next_token_logits`` returned."""
        valid = None if ids is None else ids >= 0
        options: dict[str, Any] = {"ids": ids, "ids_valid": valid, "sampling_mask": sampling_mask, **self._common}
        return vocab_parallel_head_stats(rows, self.weight(), labels, **options)

    def _best(self, hidden: Tensor, row: MicroBatchRow, k: int) -> Tensor:
        """``[T, k]`` log-probabilities of the policy's own Top-K."""
        if self._fused:
            whole, weight = self._whole(hidden), self.weight()
            options: dict[str, Any] = {
                "topk": k,
                "sampling_mask": row.own.sampling_mask,
                "plan": row.plan,
                **self._common,
            }
            found = vocab_parallel_head_stats(whole, weight, row.own.labels, **options)
            assert found.topk_logprobs is not None
            best = found.topk_logprobs
        else:
            best, _ = vocab_parallel_topk(self._logits(hidden, row.own), k, **self._common)
        return best if row.shard is None else row.shard.gather(best)

    def _logits(self, hidden: Tensor, own: TokenTargets) -> Tensor:
        """``[T, V_local]`` by Megatron's own output layer, -inf outside the sampling masks."""
        weight = self.weight() if self._model.share_embeddings_and_output_weights else None
        logits, _ = ColumnParallelLinear.forward(self._model.output_layer, hidden.transpose(0, 1), weight=weight)
        logits = logits.squeeze(1)
        if own.sampling_mask is None:
            return logits
        first, width = shard_range(logits, **self._common)
        return keep_only(logits, own.sampling_mask.ids, own.sampling_mask.counts, first, width)

    def _fused_statistics(self, hidden: Tensor, row: MicroBatchRow, objective: Objective) -> HeadStatistics:
        ids = _topk_ids(row.own)
        return vocab_parallel_head_stats(
            self._whole(hidden),
            self.weight(),
            row.own.labels,
            ids=ids,
            ids_valid=None if ids is None else ids >= 0,
            sampling_mask=row.own.sampling_mask,
            needs=objective.needs,
            plan=row.plan,
            accumulate_main_grad=self._accumulates(),
            **self._common,
        )

    def _plain(self, hidden: Tensor, row: MicroBatchRow) -> HeadStatistics:
        ids = None if row.own.rollout_topk_ids is None else row.own.rollout_topk_ids.long()
        found = vocab_parallel_statistics(
            self._logits(hidden, row.own),
            row.own.labels,
            ids=ids,
            ids_valid=None if ids is None else ids >= 0,
            **self._common,
        )
        if found.id_logprobs is None:
            return HeadStatistics(found.logprobs, found.entropy, None, None, None, None, None)
        ids, other, square = found.id_logprobs[:, :-1], found.other_logprob, found.other_square
        return HeadStatistics(found.logprobs, found.entropy, ids, other, square, None, None)

    def _whole(self, hidden: Tensor) -> Tensor:
        """``[T, H]`` on every rank of the group; backward sums the ranks' parts of its gradient."""
        hidden = hidden.squeeze(0)
        if self._model.config.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, group=self._group)
        return copy_to_tensor_model_parallel_region(hidden, group=self._group)

    def weight(self) -> Tensor:
        """``[V_local, H]`` this rank's shard of the output layer, that of the embedding where the two are one."""
        if self._model.share_embeddings_and_output_weights:
            return self._model.shared_embedding_or_output_weight()
        return self._model.output_layer.weight

    def _needs(self, objective: Objective, targets: TokenTargets) -> LossNeeds:
        slots = 0 if targets.rollout_topk_ids is None else targets.rollout_topk_ids.shape[1]
        if slots * self._model.config.tensor_model_parallel_size >= _SUMS_PAY_FROM:
            return objective.needs
        return replace(objective.needs, topk_sums=None)

    def _loss_scale(self) -> Tensor | None:
        """What Megatron multiplies the loss by before the backward pass of fp16."""
        config = self._model.config
        if not config.fp16 or config.grad_scale_func is None or not torch.is_grad_enabled():
            return None
        scale: Tensor = config.grad_scale_func(torch.ones((), device=self.weight().device))
        return scale.reshape(())

    def _accumulates(self) -> bool:
        """Straight into Megatron's gradient buffer, unless the embedding's gradient comes to the same weight.

        A buffer of bf16 would round the sum of every chunk; the head's own sums are fp32 and rounded once.
        """
        if self._model.share_embeddings_and_output_weights or not torch.is_grad_enabled():
            return False
        main_grad = getattr(self.weight(), "main_grad", None)
        return main_grad is not None and main_grad.dtype == torch.float32


def _topk_ids(targets: TokenTargets) -> Tensor | None:
    """The rollout's Top-K without the last slot, which is the sampled token: the head always has that one."""
    return None if targets.rollout_topk_ids is None else targets.rollout_topk_ids[:, :-1].long()


def _gather_row(found: HeadStatistics, shard: ContextShard) -> HeadStatistics:
    """The statistics of the whole row on every context-parallel rank, by one all-gather.

    Every rank then computes the same loss of whole sequences, and takes the gradient of its own share.
    """
    columns = {name: column for name, column in found._asdict().items() if column is not None}
    widths = [1 if column.dim() == 1 else column.shape[1] for column in columns.values()]
    row = shard.gather(torch.cat([column.view(len(column), -1) for column in columns.values()], 1))
    for (name, column), whole in zip(columns.items(), row.split(widths, 1), strict=True):
        whole = whole.view(len(row), *column.shape[1:])
        found = found._replace(**{name: whole if column.requires_grad else whole.detach()})
    return found
