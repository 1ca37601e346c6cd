"""The adapters of one of Megatron's linear layers: W + s B A, never merged in training.

Megatron joins q, k and v, and gate and up, in one weight. Each of them has an A and a B of its own here, as PEFT gives
them to a Hugging Face model; for a product all A are stacked, and the B are put in a matrix with zeros between them, by
the same rule that joins the weights. Experts' adapters are stacked too: one parameter holds those of all local experts.

What tensor parallelism splits is split as the weight is: B of a column-parallel layer, A of a row-parallel one. Ranks
exchange the low-rank product, ``rank`` numbers a token.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_dppo.config.layout import ModelShape
from megatron_dppo.config.model import LoraConfig
from megatron_dppo.hf.families.rules import Rule
from megatron_dppo.mcore.compat.grouped_gemm import grouped_linear
from megatron_dppo.mcore.compat.layers import rms_norm
from megatron_dppo.parallel.groups import ParallelGroups

Part = Literal["A", "B"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True)
class AdaptedWeight:
    """One Megatron weight that has adapters, or all experts' of a layer."""

    rule: Rule
    layer: int
    targets: frozenset[str]
    shape: ModelShape

    def hf_names(self, expert: int = 0) -> dict[str, str]:
        """The Hugging Face module of each projection that has an adapter, by the projection's name."""
        names = self.rule.names(self.layer, expert)[1]
        modules = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]  # and no bias
        named = {module.rpartition(".")[2]: module for module in modules}
        return {name: module for name, module in named.items() if name in self.targets}

    def key(self, projection: str, part: Part) -> str:
        """The name of a parameter, in checkpoints and between ranks; that of all experts has no number in it."""
        module = self.hf_names()[projection]
        return f"{module.replace('.experts.0.', '.experts.') if self.rule.is_expert else module}.lora_{part}"

    def is_split(self, part: Part) -> bool:
        """Whether ranks of tensor parallelism hold different parts of it."""
        return self.rule.shard_dim == (0 if part == "B" else 1)

    def group(self, groups: ParallelGroups) -> dist.ProcessGroup | None:
        """The ranks of tensor parallelism."""
        return groups.etp if self.rule.is_expert else groups.tp


class LinearAdapter(Module):
    """The adapters of one layer on this rank.

    Parameters are ``[rank, in]`` (A) and ``[out, rank]`` (B) of each projection; of experts ``[experts, ...]``.

    Args:
        place: which layer.
        weight: its frozen weight on this rank, or that of one of its experts.
        experts: the local experts' numbers, of the whole model; one, which does not matter, for any other layer.
        config: rank and scale.
        groups: process groups.
        sequence_parallel: whether tokens are split over tensor parallelism outside of the layer.
        seed: of A. With the same one it is the same on every layout.
    """

    def __init__(
        self,
        place: AdaptedWeight,
        weight: Tensor,
        experts: range,
        config: LoraConfig,
        groups: ParallelGroups,
        *,
        sequence_parallel: bool,
        seed: int,
    ) -> None:
        super().__init__()
        self.place, self._groups = place, groups
        self._scale, self._sequence_parallel = config.scale, sequence_parallel
        self._tp = place.group(groups)
        parts, index, shape = dist.get_world_size(self._tp), dist.get_rank(self._tp), place.shape
        self._local = replace(
            shape,
            num_attention_heads=shape.num_attention_heads // parts,
            num_query_groups=shape.num_query_groups // parts,
        )
        sizes = [len(part) for part in place.rule.split(torch.empty(weight.shape, device="meta"), self._local)]
        projections = [name.split(".")[-2] for name in place.rule.hf]
        self._sizes = dict(zip(projections, sizes, strict=True))
        """rows of each projection in the local weight, in the weight's order"""
        self._experts = place.rule.is_expert
        columns = weight.shape[1] * (parts if place.is_split("A") else 1)
        modules = [place.hf_names(expert) for expert in experts]
        for name in modules[0]:
            a = torch.stack([kaiming_uniform(config.rank, columns, f"{seed} {names[name]}") for names in modules])
            if place.is_split("A"):
                a = a.chunk(parts, 2)[index]
            b = torch.zeros(len(modules), self._sizes[name], config.rank)
            for part, value in zip(PARTS, (a, b), strict=True):
                own = (value if self._experts else value[0]).to(weight).contiguous()
                self.register_parameter(f"{name}_{part}", self._marked(Parameter(own), part))

    def _marked(self, parameter: Parameter, part: Part) -> Parameter:
        """Tell Megatron which ranks hold the same, and whose gradients are parts of one sum."""
        split = self.place.is_split(part)
        if split or self._experts:
            dim = parameter.dim() - (2 if part == "B" else 1)
            set_tensor_model_parallel_attributes(parameter, True, dim, 1)
        if self._experts:
            parameter.allreduce = dist.get_world_size(self._groups.ep) == 1  # type: ignore[attr-defined]
            # Megatron would look for copies among the ranks of tensor parallelism of dense layers.
            parameter.shared = not split and dist.get_rank(self._tp) > 0  # type: ignore[attr-defined]
        elif not split:
            parameter.sequence_parallel = self._sequence_parallel  # type: ignore[attr-defined]
        return parameter

    def parameter(self, projection: str, part: Part) -> Parameter:
        """One of them."""
        return self.get_parameter(f"{projection}_{part}")

    def b(self) -> list[Parameter]:
        """B of each projection."""
        return [self.parameter(projection, "B") for projection in self.place.hf_names()]

    def draw_b(self, weights: Sequence[Tensor], size: float) -> None:
        """Fill B at random so that ``s B A`` is about ``size`` times as large as the weight, entry by entry.

        Ranks that hold copies of a parameter draw the same.

        Args:
            weights: the layer's, on this rank; of experts each local one's.
            size: of ``s B A``.
        """
        rms = self._rms(weights)
        for projection, module in self.place.hf_names().items():
            a, b = (self.parameter(projection, part) for part in PARTS)
            if self.place.is_split("B"):
                module = f"{module} {dist.get_rank(self._tp)}"
            if self._experts:
                module = f"{module} {dist.get_rank(self._groups.ep)}"
            drawn = torch.randn(b.shape, generator=_generator(module)).to(b.device)
            b.copy_(drawn * (size * rms / (self._scale * self._rms([a]) * a.shape[-2] ** 0.5)))

    def _rms(self, parts: Sequence[Tensor]) -> Tensor:
        """Of the entries of parameters whose parts or copies the ranks of tensor parallelism have."""
        squares = torch.stack([part.float().square().mean() for part in parts]).mean()
        dist.all_reduce(squares, group=self._tp)
        return (squares / dist.get_world_size(self._tp)).sqrt()

    def joined(self) -> tuple[Tensor, Tensor]:
        """A of all projections ``[n * rank, in]`` and B ``[out, n * rank]``, for the weight as Megatron has it."""
        names = list(self.place.hf_names())
        rows, width = [], 0
        for projection, size in self._sizes.items():
            if projection not in names:
                first = self.parameter(names[0], "B")
                rows.append(first.new_zeros(*first.shape[:-2], size, len(names) * first.shape[-1]))
                continue
            b = self.parameter(projection, "B")
            after = (len(names) - 1) * b.shape[-1] - width
            rows.append(torch.nn.functional.pad(b, (width, after)))
            width += b.shape[-1]
        a = torch.cat([self.parameter(name, "A") for name in names], -2)
        if not self._experts:
            return a, self.place.rule.join(rows, self._local)
        # A rule joins rows; here experts come before them.
        return a, self.place.rule.join([part.movedim(0, -1) for part in rows], self._local).movedim(-1, 0)

    def delta(self, expert: int = 0) -> Tensor:
        """``s B A`` in fp32 ``[out, in]``, of this rank's part of the weight; ``expert`` counts the local ones."""
        a, b = (part[expert] if self._experts else part for part in self.joined())
        return self._scale * (b.float() @ a.float())

    def forward(self, x: Tensor, norm: tuple[Tensor, float] | None, splits: Sequence[int] | None = None) -> Tensor:
        """What is added to the layer's output.

        Args:
            x: the layer's input.
            norm: weight and epsilon of an RMSNorm that the layer applies to it first.
            splits: tokens of each local expert.
        """
        if norm is not None:
            x = rms_norm(x, *norm)
        a, b = self.joined()
        if splits is not None:
            return self._of_experts(x, a, b, splits)
        return self._exchanged(self._scale * (x @ a.t())) @ b.t()

    def _exchanged(self, low: Tensor) -> Tensor:
        """The low-rank product of the tokens that the layer's output has, whole."""
        if self.place.is_split("B"):
            to_all = gather_from_sequence_parallel_region, copy_to_tensor_model_parallel_region
        else:
            to_all = reduce_scatter_to_sequence_parallel_region, reduce_from_tensor_model_parallel_region
        exchange: Any = to_all[0] if self._sequence_parallel else to_all[1]
        return exchange(low, group=self._tp)

    def _of_experts(self, x: Tensor, a: Tensor, b: Tensor, splits: Sequence[int]) -> Tensor:
        """Inputs are the same on all ranks of expert tensor parallelism or split, and outputs parts of a sum or split:
        the dispatcher adds up outputs, and the gradients of inputs. Those of what is not split are added up here."""
        if self.place.is_split("B"):
            a = copy_to_tensor_model_parallel_region(a, group=self._tp)
        else:
            b = copy_to_tensor_model_parallel_region(b, group=self._tp)
        low = grouped_linear(x, splits, a.unbind(0))
        return grouped_linear(self._scale * low, splits, b.unbind(0))

    def sharded(self) -> dict[str, ShardedTensor]:
        """The parameters for Megatron's checkpoints, by their names in this module."""
        result = {}
        for projection in self.place.hf_names():
            for part in PARTS:
                parameter = self.parameter(projection, part)
                ep, copy = self._groups.ep, dist.get_rank(self._tp)
                offsets = [(0, dist.get_rank(ep), dist.get_world_size(ep))] if self._experts else []
                if self.place.is_split(part):
                    axis = parameter.dim() - (2 if part == "B" else 1)
                    offsets.append((axis, copy, dist.get_world_size(self._tp)))
                    copy = 0
                data_rank = dist.get_rank(self._groups.edp if self._experts else self._groups.dp_cp)
                result[f"{projection}_{part}"] = ShardedTensor.from_rank_offsets(
                    self.place.key(projection, part), parameter, *offsets, replica_id=(0, copy, data_rank)
                )
        return result


def kaiming_uniform(rank: int, columns: int, name: str) -> Tensor:
    """``[rank, columns]`` as PEFT draws A (kaiming_uniform with a = sqrt(5)), by a generator that ``name`` seeds."""
    bound = 1 / math.sqrt(columns)
    return torch.empty(rank, columns).uniform_(-bound, bound, generator=_generator(name))


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big"))
