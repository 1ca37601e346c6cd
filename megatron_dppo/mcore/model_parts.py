"""A policy's model on this rank with its weights, before an optimizer: chunks, weight bridge, adapters, head."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dppo.config.layout import Layout
from megatron_dppo.config.model import LoraConfig, ModelConfig
from megatron_dppo.config.rollout import RolloutConfig
from megatron_dppo.config.train import TrainConfig
from megatron_dppo.hf.folder import model_shape
from megatron_dppo.hf.weight_files import WeightSource
from megatron_dppo.mcore.bridge import Bridge
from megatron_dppo.mcore.extensions import prepare_extensions
from megatron_dppo.mcore.fusions import row_multiple
from megatron_dppo.mcore.head import OutputHead
from megatron_dppo.mcore.host_memory import ReferenceWeights
from megatron_dppo.mcore.invariant import TILE, enable_batch_invariant_mode
from megatron_dppo.mcore.lora import Lora
from megatron_dppo.mcore.megatron_bridge import ProvidedWeights, build_provided_model, provider_config
from megatron_dppo.mcore.model import build_model, transformer_config
from megatron_dppo.mcore.row_padding import exclude_padding
from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.types.model_folder import HfConfig


class Placement(NamedTuple):
    """Which model is distributed, and over which ranks."""

    hf_config: HfConfig
    layout: Layout
    groups: ParallelGroups
    platform: Platform


@dataclass(frozen=True)
class ModelParts:
    """A policy's model on this rank, with its initial weights."""

    placement: Placement
    megatron_config: TransformerConfig
    models: list[GPTModel]
    bridge: Bridge | ProvidedWeights
    lora: Lora | None
    """Adapters, which are then the only trained weights. None trains all weights."""
    reference: Callable[[], AbstractContextManager[object]] | None
    """Swaps the reference policy into the model for a ``with`` block. None without one."""
    head: OutputHead
    row_tile: int
    """Multiple that kernels need of the tokens of a rank."""
    seed: int
    """Seed of the adapters and of the layer noise."""


def build_model_parts(
    model: ModelConfig,
    lora: LoraConfig,
    train: TrainConfig,
    rollout: RolloutConfig,
    placement: Placement,
    weights: WeightSource,
    reference: WeightSource | None = None,
    *,
    seed: int,
) -> ModelParts:
    """Build the model of this rank and load its weights; a collective of all ranks.

    Of ``model`` only the numerics count: ``placement`` and ``weights`` (full tensors by Hugging Face name) replace path
    and initialization. ``reference`` has the weights of the reference policy, kept in host memory. None with adapters
    takes the model without its adapters as the reference. ``seed`` is that of adapters and layer noise.
    """
    hf_config, _, groups, platform = placement
    # Kernels and C++ extensions first: modules bind them while the model is built.
    if rollout.batch_invariant:
        enable_batch_invariant_mode(platform.device)
    megatron_config, models, bridge = _build_models(model, placement, has_replay=train.router_replay != "off")
    exclude_padding(models, megatron_config, groups)

    adapters = Lora(models, model_shape(hf_config), groups, lora, seed) if lora.rank else None
    reference_context: Callable[[], AbstractContextManager[Any]] | None = None
    if adapters is not None:
        reference_context = adapters.disabled
    if reference is not None:
        # The model holds the reference first, until its shard is copied to the host. Then the policy's weights
        # replace it.
        bridge.load(reference)
        reference_context = ReferenceWeights(models).swapped_in
    bridge.load(weights)
    return ModelParts(
        placement=placement,
        megatron_config=megatron_config,
        models=models,
        bridge=bridge,
        lora=adapters,
        reference=reference_context,
        head=OutputHead(
            models[-1],
            groups.tp,
            hf_config.vocab_size,
            rollout.temperature,
            fused=model.fused_head,
            fp32_gradient=model.fp32_head_gradient,
        ),
        row_tile=TILE if rollout.batch_invariant else row_multiple(model.transformer),
        seed=seed,
    )


def _build_models(
    model: ModelConfig, placement: Placement, *, has_replay: bool
) -> tuple[TransformerConfig, list[GPTModel], Bridge | ProvidedWeights]:
    """Return Megatron's configuration, the model chunks without weights, and their weight bridge."""
    hf_config, layout, groups, platform = placement
    pp_rank = dist.get_rank(groups.pp)
    if model.provider == "megatron-bridge":
        config = provider_config(hf_config, model, layout, platform)
        prepare_extensions(config)
        models = build_provided_model(config, pp_rank, platform.device)
        return config, models, ProvidedWeights(models, hf_config)
    config = transformer_config(hf_config, model, layout, platform, router_replay=has_replay)
    prepare_extensions(config)
    models = build_model(config, hf_config, pp_rank, platform.device)
    bridge = Bridge(models, model_shape(hf_config), tied=bool(hf_config.tie_word_embeddings), groups=groups)
    return config, models, bridge
