"""LoRA adapters on a Megatron model, added by forward hooks on its linear layers; the base weights are frozen.

They are in a module of their own in each model chunk (``chunk.adapters``). Megatron's DDP, optimizers and checkpoints
then hold adapters and nothing else. Layers of Transformer Engine and of ``megatron_dppo_megatron_cpu`` work alike.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.nn import Module

from megatron_dppo.config.layout import ModelShape
from megatron_dppo.config.model import LoraConfig
from megatron_dppo.hf.families import check_adapter_targets
from megatron_dppo.hf.families.rules import join_sections
from megatron_dppo.hf.folder import Weights
from megatron_dppo.mcore import mapping
from megatron_dppo.mcore.bridge import ADAPTERS, StageTensors, global_names
from megatron_dppo.mcore.lora_layer import FACTORS, AdaptedWeight, Factor, FusedNorm, LinearAdapter
from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.parallel.objects import all_gather

_RANDOM_SIZE = 0.25
"""Size of a random adapter's ``s B A`` relative to the weight of its layer (``Lora.randomized``)."""
PEFT_PREFIX = "base_model.model."


class Adapters(Module):
    """Adapters of one model chunk; all are off while ``is_enabled`` is False."""

    def __init__(self) -> None:
        super().__init__()
        self.is_enabled = True

    def hook(self, adapter: LinearAdapter, layer: Any, args: tuple[Any, ...], output: Any) -> Any:
        """Add the adapter's output to the layer's; a forward hook."""
        if not self.is_enabled:
            return output
        value, bias = output
        # A layer with a fused norm gets its input before the norm; the adapter needs it after the norm.
        weight = getattr(layer, "layer_norm_weight", None)
        norm = None if weight is None else FusedNorm(weight, layer.config)
        splits = args[1] if adapter.target.rule.is_expert else None
        return value + adapter(args[0], norm, splits), bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the sharded parameters for Megatron's checkpoints, by the names of ``load_state_dict``."""
        del sharded_offsets, metadata
        return {
            f"{prefix}{name}.{parameter_name}": tensor
            for name, adapter in self.named_children()
            for parameter_name, tensor in cast(LinearAdapter, adapter).sharded_parameters().items()
        }


def trainable_module(chunk: GPTModel) -> Module:
    """Return the factor of a chunk that is trained and saved: its adapters, or all of it without adapters."""
    module: Module = getattr(chunk, ADAPTERS, chunk)
    return module


class Lora:
    """Adapters of a model whose base weights are frozen, before DDP wraps it. At first they change nothing (B = 0)."""

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        shape: ModelShape,
        groups: ParallelGroups,
        config: LoraConfig,
        seed: int,
    ) -> None:
        self._groups = groups
        self._local_experts = (shape.num_experts or 1) // dist.get_world_size(groups.ep)
        self._targets = list(_adapted_weights(shape, frozenset(config.target_modules)))
        check_adapter_targets(config.target_modules, shape)
        self._adapter_by_weight: dict[Tensor, tuple[LinearAdapter, int]] = {}
        """Adapter and local expert index of each adapted base weight."""
        self._chunks = [self._attach(chunk, config, seed) for chunk in chunks]
        self._stages = StageTensors(self._parameters(), groups.pp)

    def _attach(self, chunk: GPTModel, config: LoraConfig, seed: int) -> Adapters:
        first = dist.get_rank(self._groups.ep) * self._local_experts
        weights = global_names([chunk], first)
        chunk.requires_grad_(False)
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(_require_grad_of_output)
        owners = {weight: module for module in chunk.modules() for weight in module.parameters(recurse=False)}
        adapters = Adapters()
        for target in self._targets:
            is_expert = target.rule.is_expert
            experts = range(first, first + self._local_experts) if is_expert else range(1)
            names = [target.rule.names(target.layer, expert)[0] for expert in experts]
            # Layers of other pipeline stages have no weights here.
            if names[0] not in weights:
                continue
            layer = owners[weights[names[0]]]
            adapter = LinearAdapter(
                target,
                weights[names[0]],
                experts,
                config,
                self._groups,
                sequence_parallel=chunk.config.sequence_parallel,
                seed=seed,
            )
            adapters.add_module(names[0].rpartition(".weight")[0].replace(".", "_"), adapter)
            layer.register_forward_hook(partial(adapters.hook, adapter))
            self._adapter_by_weight.update({weights[name]: (adapter, i) for i, name in enumerate(names)})
        chunk.add_module(ADAPTERS, adapters)
        return adapters

    def _parameters(self) -> dict[str, Tensor]:
        return {
            adapter.target.key(projection, factor): adapter.parameter(projection, factor)
            for adapter in self._adapters()
            for projection, factor in product(adapter.target.hf_names(), FACTORS)
        }

    def _adapters(self) -> list[LinearAdapter]:
        return [cast(LinearAdapter, adapter) for chunk in self._chunks for adapter in chunk.children()]

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Turn the adapters off inside the block."""
        for adapters in self._chunks:
            adapters.is_enabled = False
        try:
            yield
        finally:
            for adapters in self._chunks:
                adapters.is_enabled = True

    @contextmanager
    def randomized(self) -> Iterator[None]:
        """Set every B to random values inside the block, so that each adapter clearly changes its layer.

        ``s B A`` is about a quarter of the layer's weight. A server that omits or swaps an adapter then computes a
        visibly different policy. Afterwards the adapters are bitwise as before.
        """
        adapters = self._adapters()
        saved = [p.detach().clone() for adapter in adapters for p in adapter.b_matrices()]
        weights: dict[LinearAdapter, list[Tensor]] = {}
        for weight, (adapter, _) in self._adapter_by_weight.items():
            weights.setdefault(adapter, []).append(weight)
        try:
            with torch.no_grad():
                for adapter in adapters:
                    adapter.randomize_b(weights[adapter], _RANDOM_SIZE)
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip((p for a in adapters for p in a.b_matrices()), saved, strict=True):
                    parameter.copy_(value)

    @torch.no_grad()
    def merge(self, weight: Tensor) -> Tensor:
        """Return a base weight of this rank merged with its adapter: computed in fp32, in the weight's dtype."""
        if weight not in self._adapter_by_weight:
            return weight.detach()
        adapter, expert = self._adapter_by_weight[weight]
        return (weight.float() + adapter.delta(expert)).to(weight.dtype)

    @torch.no_grad()
    def export(self, read: Callable[[Tensor], Tensor] = Tensor.detach) -> Weights:
        """Stream full adapters by PEFT name, one for each expert, as ``Bridge.export`` does; a collective."""
        for target in self._targets:
            for projection, factor in product(target.hf_names(), FACTORS):
                yield from self._export_factor(target, projection, factor, read)

    def _export_factor(
        self, target: AdaptedWeight, projection: str, factor: Factor, read: Callable[[Tensor], Tensor]
    ) -> Weights:
        full = self._stages.fetch(target.key(projection, factor), read)
        if target.is_split(factor):
            full = join_sections(
                [target.cut(projection, factor, part) for part in all_gather(full, target.group(self._groups))],
                target.split_dim(factor, full),
            )
        if not target.rule.is_expert:
            yield _peft_name(target, projection, factor), full
            return
        for expert, expert_factor in enumerate(torch.cat(all_gather(full, self._groups.ep))):
            yield _peft_name(target, projection, factor, expert), expert_factor


def _adapted_weights(shape: ModelShape, targets: frozenset[str]) -> Iterator[AdaptedWeight]:
    """Yield every adapted weight of the whole model, in the order of the network; a layer's experts count as one."""
    for rule, layer, expert in mapping.parameters(shape, tied=True):
        target = AdaptedWeight(rule, layer, targets, shape)
        if expert == 0 and target.hf_names():
            yield target


def _peft_name(target: AdaptedWeight, projection: str, factor: Factor, expert: int = 0) -> str:
    return f"{PEFT_PREFIX}{target.hf_names(expert)[projection]}.lora_{factor}.weight"


def _require_grad_of_output(module: Module, args: Any, output: Tensor) -> None:
    """Make the embedding's output require a gradient; a forward hook.

    Megatron's activation recomputation gives no gradient to parameters unless one of its inputs requires a gradient,
    and the frozen embedding's output would not.
    """
    del module, args
    if torch.is_grad_enabled():
        output.requires_grad_()
