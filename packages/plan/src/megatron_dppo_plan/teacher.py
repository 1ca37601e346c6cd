"""Memory of a run's teacher on each rank, and its targets in the head."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from megatron_dppo.config.layout import Layout
from megatron_dppo.config.schema import Config
from megatron_dppo.head.teacher import TeacherTargets
from megatron_dppo.parallel.platform import DTYPES
from megatron_dppo.types import Divergence
from megatron_dppo_plan.arithmetic import BatchPlan
from megatron_dppo_plan.models import count_parameters, load_model_config


@dataclass(frozen=True, kw_only=True)
class PlannedTeacher:
    """Sizes of the teacher."""

    hf_config: Any
    parameters: int
    expert_parameters: int
    """Parameters of routed experts."""

    @classmethod
    def from_config(cls, config: Config) -> PlannedTeacher | None:
        """Return the teacher of ``distillation.teacher_path``, or None."""
        path = config.distillation.teacher_path
        if path is None:
            return None
        hf_config = load_model_config(path)[0]
        parameters, experts = count_parameters(hf_config)
        return cls(hf_config=hf_config, parameters=parameters, expert_parameters=experts)

    def bytes_on_rank(self, config: Config, layout: Layout) -> int:
        """Return the bytes of a rank's weights in host memory. All stages are assumed to be equal."""
        dense = (self.parameters - self.expert_parameters) / (layout.tp * layout.pp)
        experts = self.expert_parameters / (layout.ep * layout.etp * layout.pp)
        return round((dense + experts) * DTYPES[config.model.dtype].itemsize)

    def bytes_on_device(self, config: Config, layout: Layout) -> int:
        """Return the bytes of weights on the GPU while the teacher scores responses.

        With ``teacher_offload = "layer"`` these are the current and the next layer, embedding and output layer.
        """
        all_bytes = self.bytes_on_rank(config, layout)
        if config.distillation.teacher_offload == "model":
            return all_bytes
        layers = math.ceil(self.hf_config.num_hidden_layers / layout.pp)
        num_ends = 1 if self.hf_config.tie_word_embeddings else 2
        ends = num_ends * self.hf_config.vocab_size * self.hf_config.hidden_size // layout.tp
        ends *= DTYPES[config.model.dtype].itemsize
        return round(ends + 2 * max(0, all_bytes - ends // layout.pp) / layers)

    def hidden_bytes(self, config: Config, layout: Layout, batch: BatchPlan) -> int:
        """Return the bytes of an update's hidden states in the host memory of a last-stage rank."""
        if not config.distillation.is_exact:
            return 0
        share = layout.cp * (layout.tp if layout.sequence_parallel else 1)
        tokens = round(batch.full_rows * batch.row_tokens) // share
        return int(tokens * self.hf_config.hidden_size * DTYPES[config.model.dtype].itemsize)


def make_teacher_targets(config: Config, hidden_size: int, num_tokens: int, shard_width: int) -> TeacherTargets:
    """Return the targets of a micro-batch of ``num_tokens`` and a vocabulary shard of ``shard_width`` entries."""
    distillation = config.distillation
    dtype = DTYPES[config.model.dtype]
    hidden = torch.zeros(num_tokens, hidden_size, dtype=dtype)
    weight = torch.zeros(shard_width, hidden_size, dtype=dtype)
    return TeacherTargets(hidden, weight, Divergence(distillation.divergence, distillation.coef))
