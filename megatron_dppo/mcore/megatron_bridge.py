"""Models that Megatron Bridge builds and converts: ``model.provider = "megatron-bridge"``.

Its provider gives configuration and model, its mappings load and export the weights. Where it has no mapping or no
weight, it warns, leaves the parameter random, and does not export it. So each parameter is looked up before a load. An
export follows, which must equal what was loaded.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from megatron_dppo.config.layout import Layout
from megatron_dppo.config.model import ModelConfig
from megatron_dppo.errors import CheckpointError, ConfigError
from megatron_dppo.hf.families import FAMILIES
from megatron_dppo.hf.families.rules import OUTPUT
from megatron_dppo.hf.folder import Weights, is_mtp_weight, model_shape
from megatron_dppo.hf.weight_files import WeightSource
from megatron_dppo.mcore.fusions import check_fp8, default_fusions, row_multiple
from megatron_dppo.mcore.mapping import router_biases
from megatron_dppo.mcore.model import VOCAB_MULTIPLE, make_chunks, training_fields
from megatron_dppo.mcore.overrides import checked_overrides
from megatron_dppo.mcore.pipeline import check_pipeline_split
from megatron_dppo.mcore.row_padding import check_padding_support
from megatron_dppo.mcore.spec import block_spec
from megatron_dppo.mcore.transformer_engine import check_attention_support, has_transformer_engine
from megatron_dppo.parallel.objects import all_gather_objects
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.types.model_folder import HfConfig
from megatron_dppo_megatron_cpu.latent import ReplicatedLinear
from megatron_dppo_megatron_cpu.layers import ColumnParallelGroupedLinear, RowParallelGroupedLinear

_PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Megatron's parameters with padded vocabulary entries, which Megatron Bridge exports."""


def provider_config(hf_config: HfConfig, model: ModelConfig, layout: Layout, platform: Platform) -> object:
    """Return Megatron Bridge's provider of a model, a TransformerConfig, with this run's settings."""
    has_te = platform.is_cuda and has_transformer_engine()
    if not has_te and hf_config.model_type not in FAMILIES:
        raise ConfigError(
            f"model.provider = 'megatron-bridge' with model_type {hf_config.model_type!r}: without Transformer Engine "
            f"on a GPU there are layers for {', '.join(FAMILIES)} alone. Fix: run it on GPUs with Transformer Engine"
        )
    check_attention_support(model.dtype, layout.cp, transformer_engine=has_te)
    check_fp8(model.transformer, model.dtype, platform, transformer_engine=has_te)
    provider = _provider(hf_config)
    experts = provider.num_moe_experts is not None
    overrides = checked_overrides(model.transformer, router_replay=False)
    check_padding_support(overrides, layout.row_multiple * row_multiple(overrides))
    fields = training_fields(model, layout, platform)
    fields |= default_fusions(overrides, is_cuda=platform.is_cuda, engine=has_te, experts=experts)
    # Mappings pad the vocabulary while they split it, and not without tensor parallelism.
    fields |= {"should_pad_vocab": layout.tp > 1, "make_vocab_size_divisible_by": VOCAB_MULTIPLE}
    # Layers that predict further tokens are not trained.
    fields |= {"mtp_num_layers": None, "seq_length": hf_config.max_position_embeddings}
    if experts:
        # Providers have those of pre-training.
        fields |= {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, "moe_router_dtype": "fp32"}
        fields["moe_router_bias_update_rate"] = 0.0
    if not has_te:
        fields["transformer_layer_spec"] = _torch_layers(hf_config)
    try:
        provider.apply_overrides_and_finalize(overrides=fields | overrides)
    # Megatron raises ValueError, AssertionError, ImportError, AttributeError, ...
    except Exception as error:
        raise ConfigError(
            f"Megatron Bridge rejects this model, layout and model.transformer = {model.transformer}: "
            f"{type(error).__name__}: {error}. Fix: change model.transformer or [parallel]"
        ) from error
    check_pipeline_split(provider, layout)
    return provider


def _torch_layers(hf_config: HfConfig) -> Callable[..., TransformerBlockSubmodules]:
    """Return the spec of layers without Transformer Engine, and tell the mappings how these are split."""
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    AutoMapping.register_module_type(ColumnParallelGroupedLinear.__name__, "column")
    AutoMapping.register_module_type(RowParallelGroupedLinear.__name__, "row")
    AutoMapping.register_module_type(ReplicatedLinear.__name__, "replicated")
    shape = model_shape(hf_config)

    def spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        return block_spec(config, shape, vp_stage)

    return spec


def _provider(hf_config: HfConfig) -> Any:
    try:
        from megatron.bridge import AutoBridge
    except ImportError as error:
        raise ConfigError(
            f"model.provider = 'megatron-bridge' needs the package megatron-bridge, Python 3.12 and Transformer "
            f"Engine; importing it failed: {error}. Fix: pip install --no-deps megatron-bridge==0.6.2, with Python 3.12"
        ) from error
    try:
        return AutoBridge.from_hf_config(hf_config).to_megatron_provider(load_weights=False)
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise ConfigError(
            f"Megatron Bridge has no model for model_type {hf_config.model_type!r}, architectures "
            f"{getattr(hf_config, 'architectures', None)}: {error}"
        ) from error


def build_provided_model(provider: Any, pp_rank: int, device: torch.device) -> list[GPTModel]:
    """Return this rank's model chunks, one per virtual pipeline stage, with weights that are not loaded yet."""
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()

    def make(vp_stage: int | None, **stage: bool) -> GPTModel:
        chunk = provider.provide(vp_stage=vp_stage, **stage)
        if not isinstance(chunk, GPTModel):
            raise ConfigError(
                f"model.provider = 'megatron-bridge': expected a GPTModel, got {type(chunk).__name__}; models for "
                "images and hybrid models cannot be trained here"
            )
        return chunk

    return make_chunks(provider, pp_rank, device, make)


class ProvidedWeights:
    """Conversion between a provided model's shards and full Hugging Face tensors, by Megatron Bridge's mappings."""

    def __init__(self, chunks: list[GPTModel], hf_config: HfConfig) -> None:
        self._chunks = chunks
        self._hf_config = hf_config
        self._shape = model_shape(hf_config)
        # The output layer of a tied model is not exported, as with the families here.
        self._tied_names = set(OUTPUT.hf) if hf_config.tie_word_embeddings else set[str]()
        self._bridge: Any = None

    @torch.no_grad()
    def load(self, source: WeightSource) -> None:
        """Fill every parameter from full Hugging Face tensors, and compare the export with them; a collective."""
        from megatron.bridge import AutoBridge

        self._bridge = AutoBridge(_pretrained(self._hf_config, source))
        self._check_mappings()
        try:
            self._bridge.load_hf_weights(self._chunks)
        except (ValueError, AssertionError, KeyError, AttributeError, RuntimeError) as error:
            raise CheckpointError(
                f"Megatron Bridge cannot load these weights: {type(error).__name__}: {error}. Fix: use the complete "
                "folder of one model that it supports"
            ) from error
        self._check_export(source)

    def _check_mappings(self) -> None:
        """Check that each parameter of all ranks gets a weight; one that does not is not exported either."""
        tasks = self._bridge.get_conversion_tasks(self._chunks)
        mapped = {id(task.param_weight) for task in tasks if task is not None}
        unmapped = [
            name
            for chunk in self._chunks
            for name, parameter in chain(chunk.named_parameters(), router_biases(chunk))
            if id(parameter) not in mapped and not (self._tied_names and name.startswith("output_layer."))
        ]
        affected = _gather(unmapped)
        if affected:
            raise CheckpointError(
                f"Megatron Bridge leaves {len(affected)} parameters random, for example {affected[:2]}: it has no "
                "mapping for them, or the folder lacks their weights. Fix: use the complete folder of a model that it "
                "supports"
            )

    def _check_export(self, source: WeightSource) -> None:
        names = source.names()
        exported: set[str] = set()
        different: list[str] = []
        rank, world_size = dist.get_rank(), dist.get_world_size()
        for index, (name, tensor) in enumerate(self.export()):
            exported.add(name)
            # Every rank gets all tensors in the same order, and compares its part of them.
            is_compared = name in names and index % world_size == rank
            if is_compared and not torch.equal(source[name].to(tensor), tensor):
                different.append(name)
        missing = {name for name in names - exported - self._tied_names if not is_mtp_weight(name, self._shape)}
        for problem, affected in (
            ("are not exported", missing),
            ("are exported and were not loaded", exported - names),
            ("are exported with other values", set(_gather(different))),
        ):
            if affected:
                raise CheckpointError(
                    f"Megatron Bridge does not give back what it loaded: {len(affected)} weights {problem}, for "
                    f"example {sorted(affected)[:2]}. A server would get another policy than the one that trains. "
                    "Fix: use the complete folder of one model that it supports"
                )

    @torch.no_grad()
    def export(self, read: Callable[[Tensor], Tensor] = Tensor.detach) -> Weights:
        """Stream full tensors by Hugging Face name, as ``Bridge.export`` does; a collective to its end."""
        tasks = self._bridge.get_conversion_tasks(self._chunks)
        padded = {str(task.mapping.hf_param) for task in tasks if task.global_param_name in _PADDED}
        local = [
            task if task.param_weight is None else replace(task, param_weight=read(task.param_weight)) for task in tasks
        ]
        for name, tensor in self._bridge.export_hf_weights(self._chunks, show_progress=False, conversion_tasks=local):
            if name not in self._tied_names:
                yield name, tensor[: self._shape.vocab_size] if name in padded else tensor


def _gather(names: list[str]) -> list[str]:
    """Return the names of all ranks, each once."""
    return sorted(set(chain.from_iterable(all_gather_objects(names, dist.group.WORLD))))


def _pretrained(hf_config: HfConfig, source: WeightSource) -> Any:
    """Return a configuration and weights as Megatron Bridge reads them; nothing is read yet."""
    from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
    from megatron.bridge.models.hf_pretrained.state import StateDict, StateSource

    class Weights(StateSource):
        def get_all_keys(self) -> list[str]:
            return sorted(source.names())

        def load_tensors(self, keys: list[str]) -> dict[str, Tensor]:
            return {key: source[key] for key in keys}

    class Pretrained(PreTrainedCausalLM):
        state = StateDict(Weights())

    result = Pretrained()
    result.config = hf_config
    return result
