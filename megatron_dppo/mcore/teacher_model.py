"""A frozen teacher model in the training processes.

It has its own sizes and the policy's layout, so its hidden states and vocabulary shards are on the same ranks as the
policy's. Between its forward passes it is in host memory.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor

from megatron_dppo.config.distillation import DistillationConfig
from megatron_dppo.config.layout import pipeline_split
from megatron_dppo.config.model import ModelConfig
from megatron_dppo.head.teacher import TeacherTargets
from megatron_dppo.hf.folder import model_shape
from megatron_dppo.hf.weight_files import WeightSource
from megatron_dppo.mcore.bridge import Bridge
from megatron_dppo.mcore.forward import forward_hidden_states, forward_logprobs
from megatron_dppo.mcore.head import OutputHead
from megatron_dppo.mcore.host_memory import OffloadedModel, to_host
from megatron_dppo.mcore.model import build_model, transformer_config
from megatron_dppo.mcore.model_parts import Placement
from megatron_dppo.mcore.optim import wrap_float16
from megatron_dppo.mcore.router_replay import drop_routes
from megatron_dppo.types import Divergence, MicroBatch

_TRAINING_FIELDS = (
    "recompute_",
    "moe_aux_loss",
    "moe_z_loss",
    "moe_router_load_balancing",
    "num_layers_in_",
    "account_for_",
    "pipeline_model_parallel_layout",
)
"""Prefixes of ``model.transformer`` fields that only concern training or the split of the policy's layers."""


class MegatronTeacher:
    """Megatron model of ``distillation.teacher_path``.

    ``model`` is that of the policy, whose dtype and TransformerConfig fields the teacher shares; ``placement`` the
    teacher's model on the policy's ranks; ``weights`` are full tensors by Hugging Face name.
    """

    def __init__(
        self,
        *,
        model: ModelConfig,
        distillation: DistillationConfig,
        temperature: float,
        placement: Placement,
        weights: WeightSource,
    ) -> None:
        hf_config, layout, groups, platform = placement
        shape = model_shape(hf_config)
        # A dense teacher has no expert parallelism; its ranks then count as data parallel.
        if not shape.num_experts:
            layout = replace(layout, ep=1, etp=layout.tp)
        settings = teacher_model_config(model, has_experts=bool(shape.num_experts))
        # The teacher has its own number of layers on the policy's pipeline stages.
        settings.transformer.update(pipeline_split(shape.num_layers, layout.pp, layout.vpp))
        megatron_config = transformer_config(hf_config, settings, layout, platform)
        models = build_model(megatron_config, hf_config, dist.get_rank(groups.pp), platform.device)
        Bridge(models, shape, tied=bool(hf_config.tie_word_embeddings), groups=groups).load(weights)
        # Float16Module converts the weights, so freezing and offloading come after it.
        self.chunks = [chunk.eval() for chunk in wrap_float16(megatron_config, models)]
        for chunk in models:
            chunk.requires_grad_(False)
        self._cp_group = groups.cp if layout.cp > 1 else None
        self._head = OutputHead(models[-1], groups.tp, hf_config.vocab_size, temperature)
        self._divergence = Divergence(distillation.divergence, distillation.coef)
        self._has_head = dist.get_rank(groups.pp) == layout.pp - 1
        self._model = OffloadedModel(models, platform.device, by_layer=distillation.teacher_offload == "layer")

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the log-probabilities ``[T]`` of the labels of each micro-batch, on the last pipeline stage."""
        with self._model.loaded():
            return forward_logprobs(self.chunks, drop_routes(batches), self._head, self._cp_group)

    def compute_targets(self, batches: Sequence[MicroBatch]) -> list[TeacherTargets]:
        """Return the teacher's targets for each micro-batch.

        The list is empty on all but the last pipeline stage. The hidden states are in host memory. This rank's shard
        of the output layer stays on the device until the targets are freed.
        """
        with self._model.loaded():
            rows = forward_hidden_states(
                self.chunks, drop_routes(batches), lambda _, hidden: to_host(hidden.squeeze(0)), self._cp_group
            )
            # Read inside the block: outside of it the parameter is empty, and this reference keeps the tensor on the
            # device.
            weight = self._head.weight().detach() if self._has_head else None
        return [] if weight is None else [TeacherTargets(hidden, weight, self._divergence) for hidden in rows]


def teacher_model_config(model: ModelConfig, *, has_experts: bool) -> ModelConfig:
    """Return the policy's ``[model]`` without the ``transformer`` fields that only concern training."""
    drop = _TRAINING_FIELDS if has_experts else (*_TRAINING_FIELDS, "moe_")
    fields = {key: value for key, value in model.transformer.items() if not key.startswith(drop)}
    return model.model_copy(update={"transformer": fields})
