"""Low-rank adapters on a Megatron model, by hooks on its linear layers: the frozen base is never changed.

They live in a module of their own in each model chunk (``chunk.adapters``): Megatron's DDP, optimizers and checkpoints
then hold adapters and nothing else, with Transformer Engine's layers as with ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.nn import Module

from megatron_dppo.config.layout import ModelShape
from megatron_dppo.config.model import LoraConfig
from megatron_dppo.mcore import mapping
from megatron_dppo.mcore.bridge import ADAPTERS, StageTensors, all_gather, global_names
from megatron_dppo.mcore.lora_layer import PARTS, AdaptedWeight, LinearAdapter, Part
from megatron_dppo.parallel.groups import ParallelGroups

_DRAWN = 0.25
"""What an adapter of ``Lora.randomized`` adds, as a part of its layer's weight"""
PEFT_PREFIX = "base_model.model."
"""PEFT's name of the model that it wraps."""


class Adapters(Module):
    """The adapters of one model chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.is_on = True

    def hook(self, adapter: LinearAdapter, layer: Any, args: tuple[Any, ...], output: Any) -> Any:
        """A forward hook: the layer's output with the adapter's."""
        if not self.is_on:
            return output
        value, bias = output
        weight = getattr(layer, "layer_norm_weight", None)
        norm = None if weight is None else (weight, layer.config.layernorm_epsilon)
        splits = args[1] if adapter.place.rule.is_expert else None
        return value + adapter(args[0], norm, splits), bias

    def of_layers(self) -> Iterator[LinearAdapter]:
        """All of them."""
        yield from cast("Iterator[LinearAdapter]", self.children())

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """What ``load_state_dict`` takes, for Megatron's checkpoints; keys on disk are those of the whole model."""
        del sharded_offsets, metadata
        return {
            f"{prefix}{name}.{own}": tensor
            for name, adapter in self.named_children()
            for own, tensor in cast(LinearAdapter, adapter).sharded().items()
        }


def trainable_module(chunk: GPTModel) -> Module:
    """What of a chunk a checkpoint holds: its adapters, or all of it where it has none."""
    found: Module = getattr(chunk, ADAPTERS, chunk)
    return found


class Lora:
    """Freezes a model and gives it adapters, which at first change nothing (B = 0).

    Args:
        chunks: the model chunks of this rank, not wrapped yet.
        shape: sizes of the whole model.
        groups: process groups.
        config: rank, scale and targets.
        seed: of A.
    """

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
        self._places = list(_places(shape, frozenset(config.target_modules)))
        self._of_weight: dict[Tensor, tuple[LinearAdapter, int]] = {}
        self._chunks = [self._attach(chunk, config, seed) for chunk in chunks]
        self._stages = StageTensors(self._parameters(), groups.pp)

    def _attach(self, chunk: GPTModel, config: LoraConfig, seed: int) -> Adapters:
        first = dist.get_rank(self._groups.ep) * self._local_experts
        weights = global_names([chunk], first)
        chunk.requires_grad_(False)
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(_begin_of_graph)
        owners = {weight: module for module in chunk.modules() for weight in module.parameters(recurse=False)}
        adapters = Adapters()
        for place in self._places:
            is_expert = place.rule.is_expert
            experts = range(first, first + self._local_experts) if is_expert else range(1)
            names = [place.rule.names(place.layer, expert)[0] for expert in experts]
            if names[0] not in weights:
                continue  # another stage's
            layer = owners[weights[names[0]]]
            adapter = LinearAdapter(
                place,
                weights[names[0]],
                experts,
                config,
                self._groups,
                sequence_parallel=chunk.config.sequence_parallel,
                seed=seed,
            )
            adapters.add_module(names[0].rpartition(".weight")[0].replace(".", "_"), adapter)
            layer.register_forward_hook(partial(adapters.hook, adapter))
            self._of_weight.update({weights[name]: (adapter, i) for i, name in enumerate(names)})
        chunk.add_module(ADAPTERS, adapters)
        return adapters

    def _parameters(self) -> dict[str, Tensor]:
        adapters = [adapter for chunk in self._chunks for adapter in chunk.of_layers()]
        return {
            adapter.place.key(projection, part): adapter.parameter(projection, part)
            for adapter in adapters
            for projection in adapter.place.hf_names()
            for part in PARTS
        }

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """The base model inside."""
        self._switch(False)
        try:
            yield
        finally:
            self._switch(True)

    @contextmanager
    def randomized(self) -> Iterator[None]:
        """Inside, every B is random and an adapter adds a quarter of what its layer gives; A stays, and the weights are
        those of before afterwards. Who leaves out an adapter, or takes it for another's, has another policy then."""
        adapters = [adapter for chunk in self._chunks for adapter in chunk.of_layers()]
        kept = [p.detach().clone() for adapter in adapters for p in adapter.b()]
        weights: dict[LinearAdapter, list[Tensor]] = {}
        for weight, (adapter, _) in self._of_weight.items():
            weights.setdefault(adapter, []).append(weight)
        try:
            with torch.no_grad():
                for adapter in adapters:
                    adapter.draw_b(weights[adapter], _DRAWN)
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip((p for a in adapters for p in a.b()), kept, strict=True):
                    parameter.copy_(value)

    def _switch(self, is_on: bool) -> None:
        for adapters in self._chunks:
            adapters.is_on = is_on

    @torch.no_grad()
    def merge(self, weight: Tensor) -> Tensor:
        """A weight of the base model on this rank with its adapter, computed in fp32, in its own dtype."""
        if weight not in self._of_weight:
            return weight.detach()
        adapter, expert = self._of_weight[weight]
        return (weight.float() + adapter.delta(expert)).to(weight.dtype)

    @torch.no_grad()
    def export(self, value: Callable[[Tensor], Tensor] = Tensor.detach) -> Iterator[tuple[str, Tensor]]:
        """Stream whole adapters under PEFT's names, each expert's by itself; every rank gets all of them.

        ``value`` says what of each local parameter is exported: its data, or for example its gradient. A collective.
        """
        for place in self._places:
            for projection in place.hf_names():
                for part in PARTS:
                    yield from self._whole(place, projection, part, value)

    def _whole(
        self, place: AdaptedWeight, projection: str, part: Part, value: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        whole = self._stages.fetch(place.key(projection, part), value)
        if place.is_split(part):
            axis = whole.dim() - (2 if part == "B" else 1)
            whole = torch.cat(all_gather(whole, place.group(self._groups)), axis)
        if not place.rule.is_expert:
            yield _peft_name(place, projection, part), whole
            return
        for expert, own in enumerate(torch.cat(all_gather(whole, self._groups.ep))):
            yield _peft_name(place, projection, part, expert), own


def _places(shape: ModelShape, targets: frozenset[str]) -> Iterator[AdaptedWeight]:
    """Every weight with adapters of the whole model, in the order of the network; all experts' of a layer are one."""
    for rule, layer, expert in mapping.parameters(shape, tied=True):
        place = AdaptedWeight(rule, layer, targets, shape)
        if expert == 0 and place.hf_names():
            yield place


def _peft_name(place: AdaptedWeight, projection: str, part: Part, expert: int = 0) -> str:
    return f"{PEFT_PREFIX}{place.hf_names(expert)[projection]}.lora_{part}.weight"


def _begin_of_graph(module: Module, args: Any, output: Tensor) -> None:
    """A forward hook of the embedding: what Megatron recomputes has no gradient unless one of its inputs has."""
    del module, args
    if torch.is_grad_enabled():
        output.requires_grad_()
