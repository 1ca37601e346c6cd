"""Output head: from the model's last hidden states to the loss, fused or with Megatron's plain output layer.

GPTModel returns its hidden states instead of logits: by its hook ``output_processor``, or, in versions without it, by
an output layer that passes its input through. The plain output layer is the reference in tests of the fused head.
"""

import inspect
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple, Self, TypedDict

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
from megatron_dppo.head.columns import looked_up_ids
from megatron_dppo.head.loss import LossFunction, dppo_head_loss
from megatron_dppo.head.mixed_gemm import logits_into
from megatron_dppo.head.stats import loss_inputs, vocab_parallel_head_stats
from megatron_dppo.head.teacher import TeacherTargets, add_distillation
from megatron_dppo.head.vocab_logprobs import shard_range
from megatron_dppo.head.vocab_topk import HeadStatistics, keep_only, vocab_parallel_statistics, vocab_parallel_topk
from megatron_dppo.losses import SUPERVISED, Objective, no_policy_loss
from megatron_dppo.mcore.row import MicroBatchRow
from megatron_dppo.parallel.objects import all_gather
from megatron_dppo.types import NO_NEEDS, LossInputs, LossNeeds, LossOutput, Metric, SamplingMask, TokenTargets
from megatron_dppo_megatron_cpu.context import ContextShard

_MIN_SLOTS_FOR_SUMS = 512
"""Top-K slots times vocabulary shards from which ranks all-reduce sums instead of gathering the slots.

From here on the gather of a chunk of 4096 rows is 8 MB or more. That takes longer than one more collective of 12 bytes
a row.
"""
HAS_OUTPUT_PROCESSOR = "output_processor" in inspect.signature(GPTModel.forward).parameters
"""True if GPTModel.forward has the hook (megatron-core 0.17 and newer)."""


def hidden_states_only(*, hidden_states: Tensor, **_: object) -> Tensor:
    """Return hidden states ``[T, 1, H]`` as ``[1, T, H]``, the layout of logits; GPTModel's ``output_processor``."""
    return hidden_states.transpose(0, 1)


def hand_out_hidden_states(model: GPTModel) -> None:
    """Make a model without the hook ``output_processor`` return its last hidden states.

    Reason: GPTModel.forward has no such hook.
    Affected: Megatron Core 0.16.1.
    Delete when: 0.16.1 is no longer supported.
    """
    if model.post_process and not HAS_OUTPUT_PROCESSOR:
        # Output and bias, the pair that Megatron's linear layers return.
        model.output_layer.forward = lambda hidden, weight=None, runtime_gather_output=None: (hidden, None)


class TokenLogprobs(NamedTuple):
    """Log-probabilities of a row of T tokens, in nats, fp32, without gradient; 0 outside the loss mask.

    They are at the rollout's sampling temperature, the raw ones at temperature 1.
    """

    logprobs: Tensor
    """Log-probabilities [T] of the labels."""
    raw_logprobs: Tensor
    """Log-probabilities [T] of the labels at temperature 1."""
    id_logprobs: Tensor | None
    """Log-probabilities [T, K] of the row's Top-K ids. None if the row has none."""
    raw_id_logprobs: Tensor | None
    """Log-probabilities [T, K] of the same ids at temperature 1."""
    best_logprobs: Tensor | None
    """Log-probabilities [T, K] of the policy's Top-K, largest first. None if the row has no Top-K ids."""


class _HeadOptions(TypedDict):
    """Keyword arguments that all functions over vocabulary shards share."""

    group: ProcessGroup | None
    vocab_size: int
    temperature: float


class OutputHead:
    """Output layer and loss over vocabulary shards.

    ``model`` is the last chunk of this rank; only that of the last pipeline stage has an output layer. ``vocab_size``
    is without padding, ``temperature`` that of the rollouts. Not ``fused`` computes all logits with Megatron's output
    layer, which needs tensors of vocabulary size. ``fp32_gradient`` never rounds a part of the weight's gradient to
    bf16 before it is added.
    """

    def __init__(
        self,
        model: GPTModel,
        tp_group: ProcessGroup | None,
        vocab_size: int,
        temperature: float,
        *,
        fused: bool = True,
        fp32_gradient: bool = False,
    ) -> None:
        self._model = model
        self._fused = fused
        self._fp32_gradient = fp32_gradient
        self._group = tp_group
        self._common: _HeadOptions = {"group": tp_group, "vocab_size": vocab_size, "temperature": temperature}

    def at_temperature(self, temperature: float) -> Self:
        """Return a head with the same output layer at another temperature."""
        head = copy(self)
        head._common = {**self._common, "temperature": temperature}
        return head

    def loss(self, hidden: Tensor, row: MicroBatchRow, objective: Objective) -> LossOutput:
        """Return the loss of this rank's hidden states ``[1, T, H]``.

        Context-parallel ranks compute the loss of their tokens. A loss that needs whole sequences is computed for the
        whole row on every rank; then only the first rank counts the tokens and reports the metrics.
        """
        # A loss of single tokens: its gradient is formed in the forward pass.
        if self._fused and objective.by_token:
            return self._in_one_pass(hidden, row, objective.loss, self._needs(objective, row.targets))
        # A loss of whole sequences needs the statistics of the row at once. Backward computes the logits again.
        output = objective.loss(self.statistics(hidden, row, objective))
        if row.shard is not None and row.shard.group.rank() != 0:
            # The divergence from the teacher is added below, for this rank's tokens: report a loss of 0 until then.
            metrics = {} if row.teacher is None else {"loss": Metric(0.0, 0.0)}
            # Megatron adds up the counts of these ranks. The loss stays: each rank differentiates it by its own
            # tokens.
            output = replace(output, num_tokens=torch.zeros_like(output.num_tokens), metrics=metrics)
        if row.teacher is None:
            return output
        distillation = self._in_one_pass(hidden, row, no_policy_loss, NO_NEEDS)
        return add_distillation(output, distillation.loss_sum, distillation.metrics)

    def _in_one_pass(self, hidden: Tensor, row: MicroBatchRow, loss: LossFunction, needs: LossNeeds) -> LossOutput:
        """Compute a loss of single tokens, and the divergence from the teacher if there is one."""
        return dppo_head_loss(
            self._gather_hidden(hidden),
            self.weight(),
            # ``dppo_head_loss`` refuses sequence ids, because it shows a loss some rows at a time. This loss does not
            # read them.
            replace(row.targets, sequence_ids=None),
            loss,
            needs=needs,
            teacher=None if row.teacher is None else self._teacher_on_device(row.teacher),
            plan=row.plan,
            accumulate_main_grad=self._accumulates_main_grad(),
            grad_scale=self._loss_scale(),
            round_weight_gradient=not self._fp32_gradient,
            **self._common,
        )

    def _teacher_on_device(self, teacher: TeacherTargets) -> TeacherTargets:
        """Return the targets with the hidden states of all of this context-parallel rank's tokens, on the device."""
        hidden = teacher.hidden.to(self.weight().device, non_blocking=True)
        if self._model.config.sequence_parallel and self._group is not None:
            # Each rank holds its part of the row's tokens, as sequence parallelism splits the student's.
            parts = hidden.new_empty(self._group.size() * len(hidden), hidden.shape[1])
            torch.distributed.all_gather_into_tensor(parts, hidden, group=self._group)
            hidden = parts
        return teacher._replace(hidden=hidden)

    def statistics(self, hidden: Tensor, row: MicroBatchRow, objective: Objective = SUPERVISED) -> LossInputs:
        """Return the inputs of a loss over the whole row, 0 outside the loss mask, with the gradients that it needs."""
        check_slots(row.batch, None)
        if self._fused:
            statistics = self._fused_statistics(hidden, row, objective)
        else:
            statistics = self._plain_statistics(hidden, row)
        if not objective.needs.entropy_gradient:
            statistics = statistics._replace(entropy=statistics.entropy.detach())
        if not objective.needs.slot_gradient and statistics.id_logprobs is not None:
            statistics = statistics._replace(id_logprobs=statistics.id_logprobs.detach())
        if row.shard is not None:
            statistics = _gather_row(statistics, row.shard)
        return loss_inputs(row.batch, statistics, self._common["vocab_size"])

    def token_logprobs(self, hidden: Tensor, row: MicroBatchRow) -> TokenLogprobs:
        """Return the log-probabilities of the whole row that engines are compared with."""
        inputs = self.statistics(hidden, row)
        raw = self.at_temperature(1.0).statistics(hidden, row)
        if inputs.topk_logprobs is None or raw.topk_logprobs is None:
            return TokenLogprobs(inputs.logprobs, raw.logprobs, None, None, None)
        # The last slot is the sampled token, which ``logprobs`` has already.
        id_logprobs = inputs.topk_logprobs[:, :-1]
        raw_id_logprobs = raw.topk_logprobs[:, :-1]
        best = self._best_logprobs(hidden, row, id_logprobs.shape[1])
        return TokenLogprobs(inputs.logprobs, raw.logprobs, id_logprobs, raw_id_logprobs, best)

    def next_token_logits(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states ``[B, H]`` at ``positions [B]`` and logits ``[B, V]`` of the next tokens."""
        rows = self._gather_hidden(hidden)[positions]
        weight = self.weight()
        local_logits = logits_into(rows, weight, None, rows.new_empty(len(rows), len(weight), dtype=torch.float32))
        shards = [local_logits] if self._group is None else all_gather(local_logits, self._group)
        # Megatron pads the vocabulary at its end, so the padding is cut off after the shards are joined.
        return rows, torch.cat(shards, 1)[:, : self._common["vocab_size"]]

    def row_statistics(
        self, rows: Tensor, labels: Tensor, ids: Tensor | None, sampling_mask: SamplingMask | None
    ) -> HeadStatistics:
        """Return the statistics of hidden states ``[B, H]`` that ``next_token_logits`` returned."""
        return self._head_statistics(rows, labels, ids, sampling_mask=sampling_mask)

    def _head_statistics(
        self, hidden: Tensor, labels: Tensor, ids: Tensor | None = None, **options: Any
    ) -> HeadStatistics:
        valid = None if ids is None else ids >= 0
        return vocab_parallel_head_stats(
            hidden, self.weight(), labels, ids=ids, ids_valid=valid, **options, **self._common
        )

    def _best_logprobs(self, hidden: Tensor, row: MicroBatchRow, k: int) -> Tensor:
        """Return the log-probabilities ``[T, k]`` of the policy's Top-K, largest first."""
        if self._fused:
            statistics = self._head_statistics(
                self._gather_hidden(hidden),
                row.targets.labels,
                topk=k,
                sampling_mask=row.targets.sampling_mask,
                plan=row.plan,
            )
            assert statistics.topk_logprobs is not None
            best = statistics.topk_logprobs
        else:
            best, _ = vocab_parallel_topk(self._logits(hidden, row.targets), k, **self._common)
        return best if row.shard is None else row.shard.gather(best)

    def _logits(self, hidden: Tensor, targets: TokenTargets) -> Tensor:
        """Return the logits ``[T, V_local]`` of Megatron's output layer, -inf outside the sampling masks."""
        weight = self.weight() if self._model.share_embeddings_and_output_weights else None
        # By the class, because under 0.16.1 the layer's own ``forward`` passes its input through.
        logits, _ = ColumnParallelLinear.forward(self._model.output_layer, hidden.transpose(0, 1), weight=weight)
        logits = logits.squeeze(1)
        if targets.sampling_mask is None:
            return logits
        first, width = shard_range(logits, **self._common)
        return keep_only(logits, targets.sampling_mask.ids, targets.sampling_mask.counts, first, width)

    def _fused_statistics(self, hidden: Tensor, row: MicroBatchRow, objective: Objective) -> HeadStatistics:
        ids, _ = looked_up_ids(row.targets)
        return self._head_statistics(
            self._gather_hidden(hidden),
            row.targets.labels,
            ids,
            sampling_mask=row.targets.sampling_mask,
            needs=objective.needs,
            plan=row.plan,
            accumulate_main_grad=self._accumulates_main_grad(),
            round_weight_gradient=not self._fp32_gradient,
        )

    def _plain_statistics(self, hidden: Tensor, row: MicroBatchRow) -> HeadStatistics:
        ids = None if row.targets.rollout_topk_ids is None else row.targets.rollout_topk_ids.long()
        statistics = vocab_parallel_statistics(
            self._logits(hidden, row.targets),
            row.targets.labels,
            ids=ids,
            ids_valid=None if ids is None else ids >= 0,
            **self._common,
        )
        if statistics.id_logprobs is not None:
            # The slots here include the label's, so that the mass outside excludes it. The fused head adds the label
            # itself.
            statistics = statistics._replace(id_logprobs=statistics.id_logprobs[:, :-1])
        return statistics

    def _gather_hidden(self, hidden: Tensor) -> Tensor:
        """Return the hidden states ``[T, H]`` on every tensor-parallel rank; backward sums the ranks' gradients."""
        hidden = hidden.squeeze(0)
        if self._model.config.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, group=self._group)
        return copy_to_tensor_model_parallel_region(hidden, group=self._group)

    def weight(self) -> Tensor:
        """Return this rank's shard ``[V_local, H]`` of the output layer, or of the embedding if the two are tied."""
        if self._model.share_embeddings_and_output_weights:
            return self._model.shared_embedding_or_output_weight()
        return self._model.output_layer.weight

    def _needs(self, objective: Objective, targets: TokenTargets) -> LossNeeds:
        slots = 0 if targets.rollout_topk_ids is None else targets.rollout_topk_ids.shape[1]
        # With few slots gathering them is cheaper than one more collective.
        if slots * self._model.config.tensor_model_parallel_size >= _MIN_SLOTS_FOR_SUMS:
            return objective.needs
        return replace(objective.needs, topk_sums=None)

    def _loss_scale(self) -> Tensor | None:
        """Return Megatron's fp16 loss scale, which multiplies the loss before backward. None without fp16."""
        config = self._model.config
        if not config.fp16 or config.grad_scale_func is None or not torch.is_grad_enabled():
            return None
        # The head forms its gradient before Megatron multiplies the loss by this scale. Without it small gradients
        # would underflow in fp16.
        scale: Tensor = config.grad_scale_func(torch.ones((), device=self.weight().device))
        return scale.reshape(())

    def _accumulates_main_grad(self) -> bool:
        """Return True if the head adds its weight gradient to Megatron's ``main_grad`` itself.

        Tied weights also get the embedding's gradient through autograd, so they do not. Neither does a bf16 gradient
        buffer, which would round the sum after every chunk; the head sums in fp32 and rounds once.
        """
        if self._model.share_embeddings_and_output_weights or not torch.is_grad_enabled():
            return False
        main_grad = getattr(self.weight(), "main_grad", None)
        return main_grad is not None and main_grad.dtype == torch.float32


def _gather_row(statistics: HeadStatistics, shard: ContextShard) -> HeadStatistics:
    """Return the statistics of the whole row on every context-parallel rank; one all-gather.

    Every rank then computes the same loss of whole sequences. Backward gives each rank the gradient of its tokens.
    """
    columns = {name: column for name, column in statistics._asdict().items() if column is not None}
    widths = [1 if column.dim() == 1 else column.shape[1] for column in columns.values()]
    row = shard.gather(torch.cat([column.view(len(column), -1) for column in columns.values()], 1))
    for (name, column), gathered in zip(columns.items(), row.split(widths, 1), strict=True):
        gathered = gathered.view(len(row), *column.shape[1:])
        # One gather carries all columns, so those without a gradient must be detached again.
        statistics = statistics._replace(**{name: gathered if column.requires_grad else gathered.detach()})
    return statistics
