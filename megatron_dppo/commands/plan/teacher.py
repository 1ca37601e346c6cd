"""The teacher of a run in its plan: what a rank holds of it, and its side of the head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_dppo.commands.plan.arithmetic import Batch
from megatron_dppo.commands.plan.models import model_config, parameter_counts
from megatron_dppo.config.layout import Layout
from megatron_dppo.config.schema import Config
from megatron_dppo.head.teacher import TeacherTargets
from megatron_dppo.parallel.platform import DTYPES
from megatron_dppo.types import Divergence


@dataclass(frozen=True, kw_only=True)
class TeacherModel:
    """Its sizes."""

    hf_config: Any
    parameters: int
    expert_parameters: int
    """of these, in routed experts"""

    @classmethod
    def of(cls, config: Config) -> TeacherModel | None:
        """That of ``distillation.teacher_path``; None without.

        Raises:
            CheckpointError: no such folder, and no known model of that name.
        """
        path = config.distillation.teacher_path
        if path is None:
            return None
        hf_config = model_config(path)[0]
        parameters, experts = parameter_counts(hf_config)
        return cls(hf_config=hf_config, parameters=parameters, expert_parameters=experts)

    def bytes_on_rank(self, config: Config, layout: Layout) -> int:
        """Of its weights, in host memory, and on the device while it looks at the responses; stages taken as equal."""
        dense = (self.parameters - self.expert_parameters) / (layout.tp * layout.pp)
        experts = self.expert_parameters / (layout.ep * layout.etp * layout.pp)
        return round((dense + experts) * DTYPES[config.model.dtype].itemsize)

    def bytes_on_device(self, config: Config, layout: Layout) -> int:
        """Of its weights on the GPU while it looks at the responses: with ``by_layer`` two layers, of which one is
        freed when the next one is there, and both ends of the model."""
        whole = self.bytes_on_rank(config, layout)
        if config.distillation.teacher_weights == "whole":
            return whole
        layers = self.hf_config.num_hidden_layers // layout.pp
        tied = 1 if self.hf_config.tie_word_embeddings else 2
        ends = tied * self.hf_config.vocab_size * self.hf_config.hidden_size // layout.tp
        ends *= DTYPES[config.model.dtype].itemsize
        return round(ends + 2 * max(0, whole - ends // layout.pp) / layers)

    def hidden_bytes(self, config: Config, layout: Layout, batch: Batch) -> int:
        """Of its hidden states of an update's responses, in the host memory of a rank of the last stage."""
        if not config.distillation.is_exact:
            return 0
        share = layout.cp * (layout.tp if layout.sequence_parallel else 1)
        tokens = batch.micro_batches * config.train.micro_batch_tokens // share
        return int(tokens * self.hf_config.hidden_size * DTYPES[config.model.dtype].itemsize)


def make_teacher_targets(config: Config, hidden_size: int, rows: int, width: int) -> TeacherTargets:
    """One micro-batch's, of ``rows`` tokens and a shard of ``width`` entries of the vocabulary."""
    chosen, dtype = config.distillation, DTYPES[config.model.dtype]
    hidden, weight = (torch.zeros(number, hidden_size, dtype=dtype) for number in (rows, width))
    return TeacherTargets(hidden, weight, Divergence(chosen.divergence, chosen.coef))
