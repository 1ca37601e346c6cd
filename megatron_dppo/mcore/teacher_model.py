"""A second model beside the policy, frozen, of sizes of its own: what it says of the policy's micro-batches.

It is split as the policy is, so that its hidden states lie on the ranks, rows and vocabulary shards where the policy's
do. Between its passes it is in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_dppo.config.distillation import DistillationConfig
from megatron_dppo.config.layout import Layout
from megatron_dppo.config.model import ModelConfig
from megatron_dppo.head.teacher import TeacherTargets
from megatron_dppo.hf.folder import model_shape
from megatron_dppo.mcore.bridge import Bridge, WeightSource
from megatron_dppo.mcore.forward import forward_hidden_states, forward_logprobs
from megatron_dppo.mcore.head import OutputHead
from megatron_dppo.mcore.host_memory import OffloadedModel, to_host
from megatron_dppo.mcore.model import build_model, transformer_config
from megatron_dppo.mcore.optim import wrap_float16
from megatron_dppo.mcore.router_replay import drop_routes
from megatron_dppo.mcore.row import MicroBatchRow
from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.types import Divergence, MicroBatch

_OF_TRAINING = (
    "recompute_",
    "moe_aux_loss",
    "moe_z_loss",
    "moe_router_load_balancing",
    "num_layers_in_",
    "account_for_",
)
"""Beginnings of the fields of ``model.transformer`` that say how the policy is trained, or how its layers are dealt."""


class TeacherModel:
    """Megatron's model of ``distillation.teacher_path``.

    Args:
        model: the policy, whose dtype and fields of TransformerConfig it has.
        distillation: the divergence, and what of the weights is on the device.
        temperature: of the rollouts.
        hf_config: the transformers config of the teacher.
        weights: its weights, full tensors by Hugging Face name.
        layout: the policy's.
        groups: the policy's.
        platform: the device of this process.
    """

    def __init__(
        self,
        *,
        model: ModelConfig,
        distillation: DistillationConfig,
        temperature: float,
        hf_config: Any,
        weights: WeightSource,
        layout: Layout,
        groups: ParallelGroups,
        platform: Platform,
    ) -> None:
        shape = model_shape(hf_config)
        if not shape.num_experts:
            layout = replace(layout, ep=1, etp=layout.tp)
        settings = teacher_model_config(model, has_experts=bool(shape.num_experts))
        megatron_config = transformer_config(hf_config, settings, layout, platform)
        models = build_model(megatron_config, hf_config, dist.get_rank(groups.pp), platform.device)
        Bridge(models, shape, tied=bool(hf_config.tie_word_embeddings), groups=groups).load(weights)
        self._chunks = [chunk.eval() for chunk in wrap_float16(megatron_config, models)]
        for chunk in models:
            chunk.requires_grad_(False)
        self._cp_group = groups.cp if layout.cp > 1 else None
        self._head = OutputHead(models[-1], groups.tp, hf_config.vocab_size, temperature)
        self._divergence = Divergence(distillation.divergence, distillation.coef)
        self._has_head = dist.get_rank(groups.pp) == layout.pp - 1
        self._model = OffloadedModel(models, platform.device, by_layer=distillation.teacher_weights == "by_layer")

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Log-probabilities ``[T]`` of the labels of each micro-batch; empty but on the last pipeline stage."""
        with self._model.loaded():
            return forward_logprobs(self._chunks, drop_routes(batches), self._head, self._cp_group)

    def compute_targets(self, batches: Sequence[MicroBatch]) -> list[TeacherTargets]:
        """The teacher's side of the loss of each micro-batch; empty but on the last pipeline stage.

        Its hidden states wait in host memory; its share of the output layer is on the device until these are dropped.
        """
        with self._model.loaded():
            rows = forward_hidden_states(self._chunks, drop_routes(batches), _own_hidden, self._cp_group)
            weight = self._head.weight().detach() if self._has_head else None
        return [] if weight is None else [TeacherTargets(hidden, weight, self._divergence) for hidden in rows]


def teacher_model_config(model: ModelConfig, *, has_experts: bool) -> ModelConfig:
    """The policy's ``[model]`` with the fields of ``transformer`` that a model which is not trained has too."""
    drop = _OF_TRAINING if has_experts else (*_OF_TRAINING, "moe_")
    fields = {key: value for key, value in model.transformer.items() if not key.startswith(drop)}
    return model.model_copy(update={"transformer": fields})


def _own_hidden(_: MicroBatchRow, hidden: Tensor) -> Tensor:
    """``[t, H]`` of this rank's rows, in host memory."""
    return to_host(hidden.squeeze(0))
