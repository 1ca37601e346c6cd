"""Hugging Face weights into a sharded Megatron model, and out of it again, streamed one parameter at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dppo.config.layout import ModelShape
from megatron_dppo.errors import CheckpointError
from megatron_dppo.hf.families.rules import OUTPUT, Rule
from megatron_dppo.mcore import mapping
from megatron_dppo.mcore.mapping import router_biases
from megatron_dppo.mcore.model import padded_vocab_size
from megatron_dppo.parallel.groups import ParallelGroups


class WeightSource(Protocol):
    """Full Hugging Face tensors by their on-disk name."""

    def __getitem__(self, name: str) -> Tensor:
        """One tensor."""

    def names(self) -> set[str]:
        """All names."""


ADAPTERS = "adapters"
"""What of a model chunk is no part of the Hugging Face model (``mcore.lora``)."""


def global_names(chunks: Sequence[GPTModel], first_expert: int) -> dict[str, Tensor]:
    """The parameters of this rank, routers' biases too, by name with layer and expert indices of the whole model."""
    result = {}
    for chunk in chunks:
        offset = get_transformer_layer_offset(chunk.config, chunk.vp_stage)

        for name, parameter in chain(chunk.named_parameters(), router_biases(chunk)):
            if name.startswith(f"{ADAPTERS}."):
                continue
            name = _shift_index(r"^(decoder\.layers\.)(\d+)", name, offset)
            name = _shift_index(r"(\.experts\.linear_fc[12]\.weight)(\d+)$", name, first_expert)
            result[name] = parameter
    return result


def _shift_index(pattern: str, name: str, by: int) -> str:
    return re.sub(pattern, lambda match: f"{match[1]}{int(match[2]) + by}", name)


class StageTensors:
    """Tensors that each live on one pipeline stage, fetched from there by their names.

    Args:
        mine: those of this rank.
        pp: the stages.
    """

    def __init__(self, mine: Mapping[str, Tensor], pp: ProcessGroup | None) -> None:
        self._mine, self._pp = mine, pp
        self._device = next(iter(mine.values())).device
        stages: list[dict[str, tuple[torch.Size, torch.dtype]]] = [{} for _ in range(dist.get_world_size(pp))]
        dist.all_gather_object(stages, {name: (p.shape, p.dtype) for name, p in mine.items()}, group=pp)
        self._owners: dict[str, tuple[int, torch.Size, torch.dtype]] = {}
        for stage, names in enumerate(stages):
            for name, (shape, dtype) in names.items():
                self._owners.setdefault(name, (stage, shape, dtype))

    def fetch(self, name: str, value: Callable[[Tensor], Tensor]) -> Tensor:
        """``value`` of a tensor on all stages (a collective of them); it keeps the tensor's shape and dtype."""
        stage, shape, dtype = self._owners[name]
        if dist.get_world_size(self._pp) == 1:
            return value(self._mine[name])
        if dist.get_rank(self._pp) == stage:
            local = value(self._mine[name]).contiguous()
        else:
            local = torch.empty(shape, dtype=dtype, device=self._device)
        dist.broadcast(local, group=self._pp, group_src=stage)
        return local


class Bridge:
    """The mapping between one model's shards and the Hugging Face names.

    Args:
        chunks: the unwrapped model chunks of this rank.
        shape: sizes of the whole model.
        tied: whether input and output embeddings share their weights.
        groups: the process groups that the model is sharded over.
    """

    def __init__(self, chunks: Sequence[GPTModel], shape: ModelShape, *, tied: bool, groups: ParallelGroups) -> None:
        self._shape, self._tied, self._groups = shape, tied, groups
        self._local_experts = (shape.num_experts or 1) // dist.get_world_size(groups.ep)
        self._parameters = global_names(chunks, dist.get_rank(groups.ep) * self._local_experts)
        self._padded_vocab = padded_vocab_size(shape.vocab_size, dist.get_world_size(groups.tp))
        self._stages = StageTensors(self._parameters, groups.pp)

    def _shard_group(self, rule: Rule) -> ProcessGroup | None:
        return self._groups.etp if rule.is_expert else self._groups.tp

    @torch.no_grad()
    def load(self, source: WeightSource) -> None:
        """Fill every parameter of this rank from full Hugging Face tensors.

        Raises:
            CheckpointError: weights are missing, unexpected or of another shape.
        """
        self._check_names(source.names())
        for name, parameter in self._parameters.items():
            rule, layer, expert = mapping.find_rule(name, self._shape, self._tied)
            hf_names = rule.names(layer, expert)[1]
            full = rule.join([source[hf_name] for hf_name in hf_names], self._shape)
            if rule.padded:
                full = mapping.pad_vocabulary(full, self._padded_vocab)
            group = self._shard_group(rule)
            local = mapping.shard(rule, full, dist.get_rank(group), dist.get_world_size(group))
            if local.shape != parameter.shape:
                raise CheckpointError(
                    f"{', '.join(hf_names)} give a shard of shape {tuple(local.shape)} for {name}, expected "
                    f"{tuple(parameter.shape)}; the weights belong to a model of another size than config.json"
                )
            parameter.copy_(local)

    def _check_names(self, found: set[str]) -> None:
        expected: set[str] = set()
        for rule, layer, expert in mapping.parameters(self._shape, self._tied):
            expected.update(rule.names(layer, expert)[1])
        extra = {name for name in found - expected - set(OUTPUT.hf) if not mapping.is_mtp_weight(name, self._shape)}
        missing = expected - found
        if missing or extra:
            raise CheckpointError(
                f"the weights do not fit config.json: {len(missing)} missing (e.g. {sorted(missing)[:2]}), "
                f"{len(extra)} unexpected (e.g. {sorted(extra)[:2]})"
            )

    @torch.no_grad()
    def export(self, value: Callable[[Tensor], Tensor] = Tensor.detach) -> Iterator[tuple[str, Tensor]]:
        """Stream full tensors under their Hugging Face names; every rank gets all of them.

        ``value`` says what of each local parameter is exported: its data, or for example its gradient.

        A collective: all ranks must run the iterator to its end. One all-gather over tensor parallelism a parameter,
        one more over expert parallelism for each local expert, one broadcast over the pipeline.
        """
        for rule, layer, expert in mapping.parameters(self._shape, self._tied):
            if not rule.is_expert:
                full = self._gather_shards(rule, self._stages.fetch(rule.names(layer, 0)[0], value))
                if rule.padded:
                    full = full[: self._shape.vocab_size]
                yield from self._named(rule, layer, expert, full)
            elif expert < self._local_experts:
                yield from self._export_experts(rule, layer, expert, value)

    def _export_experts(
        self, rule: Rule, layer: int, local: int, value: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        ep = self._groups.ep
        mine = dist.get_rank(ep) * self._local_experts + local
        full = self._gather_shards(rule, self._stages.fetch(rule.names(layer, mine)[0], value))
        for ep_rank, tensor in enumerate(all_gather(full, ep)):
            yield from self._named(rule, layer, ep_rank * self._local_experts + local, tensor)

    def _named(self, rule: Rule, layer: int, expert: int, full: Tensor) -> Iterator[tuple[str, Tensor]]:
        names = rule.names(layer, expert)[1]
        return zip(names, rule.split(full, self._shape), strict=True)

    def _gather_shards(self, rule: Rule, local: Tensor) -> Tensor:
        if rule.shard_dim is None:
            return local
        return mapping.unshard(rule, all_gather(local, self._shard_group(rule)))


def all_gather(local: Tensor, group: ProcessGroup | None) -> list[Tensor]:
    """The tensors of all ranks of a group, which have the same shape."""
    parts = dist.get_world_size(group)
    if parts == 1:
        return [local]
    gathered = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(parts)]
    dist.all_gather(gathered, local.contiguous(), group=group)
    return gathered
