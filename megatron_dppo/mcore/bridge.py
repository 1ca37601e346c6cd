"""Hugging Face weights into a sharded Megatron model and back, streamed one parameter at a time."""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dppo.config.layout import ModelShape
from megatron_dppo.errors import CheckpointError
from megatron_dppo.hf.families.rules import OUTPUT, Rule
from megatron_dppo.hf.folder import Weights, is_mtp_weight
from megatron_dppo.hf.weight_files import DTYPES, WeightSource, check_tied_output
from megatron_dppo.mcore import mapping
from megatron_dppo.mcore.mapping import router_biases
from megatron_dppo.mcore.model import padded_vocab_size
from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.parallel.objects import all_gather

ADAPTERS = "adapters"
"""Name of the submodule of a model chunk that holds its LoRA adapters, which have no Hugging Face weights."""


def global_names(chunks: Sequence[GPTModel], first_expert: int) -> dict[str, Tensor]:
    """Return this rank's parameters and router biases by name, with layer and expert indices of the whole model."""
    result = {}
    for chunk in chunks:
        # Megatron counts layers from 0 in each chunk, and experts from 0 on each expert-parallel rank.
        offset = get_transformer_layer_offset(chunk.config, chunk.vp_stage)
        for name, parameter in chain(chunk.named_parameters(), router_biases(chunk)):
            if name.startswith(f"{ADAPTERS}."):
                continue
            name = _shift_index(r"^(decoder\.layers\.)(\d+)", name, offset)
            name = _shift_index(r"(\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)$", name, first_expert)
            result[name] = parameter
    return result


def _shift_index(pattern: str, name: str, offset: int) -> str:
    return re.sub(pattern, lambda match: f"{match[1]}{int(match[2]) + offset}", name)


class StageTensors:
    """Tensors of all pipeline stages, fetched by name; ``local`` are those of this stage."""

    def __init__(self, local: Mapping[str, Tensor], pp: ProcessGroup | None) -> None:
        self._local = local
        self._pp = pp
        self._device = next(iter(local.values())).device
        stages: list[dict[str, tuple[torch.Size, torch.dtype]]] = [{} for _ in range(dist.get_world_size(pp))]
        dist.all_gather_object(stages, {name: (p.shape, p.dtype) for name, p in local.items()}, group=pp)
        self._owners: dict[str, tuple[int, torch.Size, torch.dtype]] = {}
        for stage, names in enumerate(stages):
            for name, (shape, dtype) in names.items():
                # Tied embeddings are on the first and the last stage: the first one sends them.
                self._owners.setdefault(name, (stage, shape, dtype))

    def fetch(self, name: str, read: Callable[[Tensor], Tensor]) -> Tensor:
        """Return ``read(tensor)``, of the tensor's shape and dtype, on all stages; a collective of them."""
        stage, shape, dtype = self._owners[name]
        if dist.get_world_size(self._pp) == 1:
            return read(self._local[name])
        if dist.get_rank(self._pp) == stage:
            local = read(self._local[name]).contiguous()
        else:
            local = torch.empty(shape, dtype=dtype, device=self._device)
        dist.broadcast(local, group=self._pp, group_src=stage)
        return local


class Bridge:
    """Conversion between one model's shards and full Hugging Face tensors."""

    def __init__(self, chunks: Sequence[GPTModel], shape: ModelShape, *, tied: bool, groups: ParallelGroups) -> None:
        self._shape = shape
        self._tied = tied
        self._groups = groups
        self._local_experts = (shape.num_experts or 1) // dist.get_world_size(groups.ep)
        self._parameters = global_names(chunks, dist.get_rank(groups.ep) * self._local_experts)
        self._padded_vocab = padded_vocab_size(shape.vocab_size, dist.get_world_size(groups.tp))
        self._stages = StageTensors(self._parameters, groups.pp)

    def _shard_group(self, rule: Rule) -> ProcessGroup | None:
        return self._groups.etp if rule.is_expert else self._groups.tp

    @torch.no_grad()
    def load(self, source: WeightSource) -> None:
        """Fill every parameter of this rank from full Hugging Face tensors; a CheckpointError if they do not fit."""
        self._check_names(source.names())
        if self._tied:
            check_tied_output(source)
        for name, parameter in self._parameters.items():
            rule, layer, expert = mapping.find_rule(name, self._shape, self._tied)
            hf_names = rule.names(layer, expert)[1]
            tensors = [source[hf_name] for hf_name in hf_names]
            for hf_name, tensor, expected in zip(hf_names, tensors, self._hf_shapes(rule, parameter), strict=True):
                if tensor.shape != expected or tensor.dtype not in DTYPES.values():
                    raise CheckpointError(
                        f"Expected {hf_name} with shape {tuple(expected)} in a floating dtype of 16 bits or more, got "
                        f"{tuple(tensor.shape)} in {tensor.dtype}: the weights do not fit config.json."
                    )
            full = rule.join(tensors, self._shape)
            if rule.padded:
                full = mapping.pad_vocabulary(full, self._padded_vocab)
            group = self._shard_group(rule)
            rank, parts = dist.get_rank(group), dist.get_world_size(group)
            parameter.copy_(mapping.shard(rule, full, rank, parts, self._shape))

    def _hf_shapes(self, rule: Rule, parameter: Tensor) -> list[torch.Size]:
        """Return the shape of each Hugging Face tensor of a parameter, from that of its shard.

        Tensors of other shapes can join to the same shard (rows of k in q), and a short vocabulary would be padded.
        """
        full = list(parameter.shape)
        if rule.shard_dim is not None:
            full[rule.shard_dim] *= dist.get_world_size(self._shard_group(rule))
        if rule.padded:
            full[0] = self._shape.vocab_size
        return [part.shape for part in rule.split(torch.empty(full, device="meta"), self._shape)]

    def _check_names(self, names: set[str]) -> None:
        expected: set[str] = set()
        for rule, layer, expert in mapping.parameters(self._shape, self._tied):
            expected.update(rule.names(layer, expert)[1])
        # Files of a tied model may hold the output layer too; it equals the embedding and is not loaded.
        extra = {name for name in names - expected - set(OUTPUT.hf) if not is_mtp_weight(name, self._shape)}
        missing = expected - names
        if missing or extra:
            raise CheckpointError(
                f"The weights do not match config.json: {len(missing)} missing (e.g. {sorted(missing)[:2]}), "
                f"{len(extra)} unexpected (e.g. {sorted(extra)[:2]}). Fix: use the complete folder of one model"
            )

    @torch.no_grad()
    def export(self, read: Callable[[Tensor], Tensor] = Tensor.detach) -> Weights:
        """Stream full tensors by Hugging Face name; a collective to the iterator's end. Every rank gets all of them.

        One broadcast over pipeline and one all-gather over tensor parallelism for each parameter, one all-gather over
        expert parallelism for each local expert. ``read`` returns the exported value of a local parameter: its data, or
        for example its gradient.
        """
        for rule, layer, expert in mapping.parameters(self._shape, self._tied):
            if not rule.is_expert:
                full = self._gather_shards(rule, self._stages.fetch(rule.names(layer, 0)[0], read))
                if rule.padded:
                    full = full[: self._shape.vocab_size]
                yield from self._named(rule, layer, expert, full)
            # Local expert i of all expert-parallel ranks is gathered at once.
            elif expert < self._local_experts:
                yield from self._export_experts(rule, layer, expert, read)

    def _export_experts(self, rule: Rule, layer: int, local: int, read: Callable[[Tensor], Tensor]) -> Weights:
        # Expert-parallel ranks fetch different experts here, each from the pipeline stages of its own group.
        global_expert = dist.get_rank(self._groups.ep) * self._local_experts + local
        full = self._gather_shards(rule, self._stages.fetch(rule.names(layer, global_expert)[0], read))
        for ep_rank, tensor in enumerate(all_gather(full, self._groups.ep)):
            yield from self._named(rule, layer, ep_rank * self._local_experts + local, tensor)

    def _named(self, rule: Rule, layer: int, expert: int, full: Tensor) -> Weights:
        names = rule.names(layer, expert)[1]
        return zip(names, rule.split(full, self._shape), strict=True)

    def _gather_shards(self, rule: Rule, local: Tensor) -> Tensor:
        if rule.shard_dim is None:
            return local
        return mapping.unshard(rule, all_gather(local, self._shard_group(rule)), self._shape)
