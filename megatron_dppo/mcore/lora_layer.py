"""LoRA adapters of one of Megatron's linear layers: W + s B A, never merged in training.

Megatron joins q, k and v, and gate and up, in one weight. Here each projection has an A and a B of its own, as PEFT
gives them to a Hugging Face model. For the product all A are stacked, and all B form a block matrix with zeros between
the blocks, by the rule that joins the weights. One parameter holds the adapters of all local experts.

Tensor parallelism splits a factor as the weight is split: B of a column-parallel layer, A of a row-parallel one. Ranks
exchange the low-rank product, ``rank`` numbers per token. Layers that every rank has whole (the latents of MLA) have
whole factors and exchange nothing.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_dppo.config.layout import ModelShape
from megatron_dppo.config.model import LoraConfig
from megatron_dppo.hf.families.rules import Rule, cut_sections
from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo_megatron_cpu.grouped_gemm import grouped_linear
from megatron_dppo_megatron_cpu.layers import rms_norm

Factor = Literal["A", "B"]
FACTORS: tuple[Factor, ...] = get_args(Factor)


@dataclass(frozen=True)
class AdaptedWeight:
    """One Megatron weight with adapters, or the weights of all experts of a layer."""

    rule: Rule
    layer: int
    targets: frozenset[str]
    shape: ModelShape

    def hf_names(self, expert: int = 0) -> dict[str, str]:
        """Return the Hugging Face module of each projection with an adapter, by projection name."""
        names = self.rule.names(self.layer, expert)[1]
        # Biases have no adapter.
        modules = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
        named = {module.rpartition(".")[2]: module for module in modules}
        return {name: module for name, module in named.items() if name in self.targets}

    def key(self, projection: str, factor: Factor) -> str:
        """Return the name of a parameter in checkpoints and between ranks, without a number for experts."""
        module = self.hf_names()[projection]
        return f"{module.replace('.experts.0.', '.experts.') if self.rule.is_expert else module}.lora_{factor}"

    def is_split(self, factor: Factor) -> bool:
        """Return True if tensor-parallel ranks hold different parts of the factor."""
        return self.rule.shard_dim == (0 if factor == "B" else 1)

    def split_dim(self, factor: Factor, parameter: Tensor) -> int:
        """Return the dimension of a factor that belongs to the weight's ``shard_dim``; experts stand before it."""
        return parameter.dim() - (2 if factor == "B" else 1)

    def cut(self, projection: str, factor: Factor, parameter: Tensor) -> list[Tensor]:
        """Return the sections of a split factor, each of which tensor parallelism splits separately."""
        sizes: tuple[int, ...] = (1,)
        if factor == "B" and self.rule.hf_sections is not None:
            projections = [name.split(".")[-2] for name in self.rule.hf]
            sizes = self.rule.hf_sections(self.shape)[projections.index(projection)]
        return cut_sections(parameter, sizes, self.split_dim(factor, parameter))

    def group(self, groups: ParallelGroups) -> dist.ProcessGroup | None:
        """Return the tensor-parallel group of the weight."""
        return groups.etp if self.rule.is_expert else groups.tp


class FusedNorm(NamedTuple):
    """RMSNorm that a linear layer applies to its input."""

    weight: Tensor
    config: TransformerConfig

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize ``x [..., hidden_size]``."""
        zero_centered = self.config.layernorm_zero_centered_gamma
        return rms_norm(x, self.weight, self.config.layernorm_epsilon, zero_centered=zero_centered)


class LinearAdapter(Module):
    """Adapters of one layer on this rank.

    Each projection has parameters A ``[rank, in]`` and B ``[out, rank]``; those of experts are ``[num_experts, ...]``.
    ``weight`` is the frozen weight on this rank, or that of one of its experts, whose global indices are ``experts``
    (any range of length 1 for other layers). ``sequence_parallel``: tokens are split over tensor-parallel ranks outside
    of the layer.
    """

    def __init__(
        self,
        target: AdaptedWeight,
        weight: Tensor,
        experts: range,
        config: LoraConfig,
        groups: ParallelGroups,
        *,
        sequence_parallel: bool,
        seed: int,
    ) -> None:
        super().__init__()
        self.target = target
        self._groups = groups
        self._scale = config.scale
        self._sequence_parallel = sequence_parallel
        self._tp = target.group(groups)
        parts = dist.get_world_size(self._tp)
        index = dist.get_rank(self._tp)
        shape = target.shape
        # Rules split q, k and v by heads, so they need this rank's number of heads.
        self._local_shape = shape.tensor_parallel_shard(parts)
        sizes = [len(part) for part in target.rule.split(torch.empty(weight.shape, device="meta"), self._local_shape)]
        projections = [name.split(".")[-2] for name in target.rule.hf]
        self._sizes = dict(zip(projections, sizes, strict=True))
        """Rows of each projection in the local weight, in the weight's order."""
        self._is_expert = target.rule.is_expert
        columns = weight.shape[1] * (parts if target.is_split("A") else 1)
        modules = [target.hf_names(expert) for expert in experts]
        for name in modules[0]:
            # Every rank generates the full A and keeps its part: A is then the same on every layout.
            a = torch.stack([kaiming_uniform(config.rank, columns, f"{seed} {names[name]}") for names in modules])
            if target.is_split("A"):
                a = a.chunk(parts, 2)[index]
            b = torch.zeros(len(modules), self._sizes[name], config.rank)
            for factor, value in zip(FACTORS, (a, b), strict=True):
                local = (value if self._is_expert else value[0]).to(weight).contiguous()
                self.register_parameter(f"{name}_{factor}", self._mark(Parameter(local), factor))

    def _mark(self, parameter: Parameter, factor: Factor) -> Parameter:
        """Set the attributes by which Megatron reduces a parameter's gradient and counts it in the gradient norm."""
        is_split = self.target.is_split(factor)
        if is_split or self._is_expert:
            dim = self.target.split_dim(factor, parameter)
            set_tensor_model_parallel_attributes(parameter, True, dim, 1)
        if self._is_expert:
            # False makes Megatron's DDP reduce over expert-data-parallel instead of data-parallel ranks.
            parameter.allreduce = dist.get_world_size(self._groups.ep) == 1  # type: ignore[attr-defined]
            # The gradient norm counts replicas once. Megatron looks for them in the dense layers' tensor-parallel
            # group, which is not that of experts: mark the replicas as shared instead.
            parameter.shared = not is_split and dist.get_rank(self._tp) > 0  # type: ignore[attr-defined]
        elif not is_split:
            # finalize_model_grads sums the gradient over the tensor-parallel ranks, whose tokens differ.
            parameter.sequence_parallel = self._sequence_parallel  # type: ignore[attr-defined]
        return parameter

    def parameter(self, projection: str, factor: Factor) -> Parameter:
        """Return the factor of a projection."""
        return self.get_parameter(f"{projection}_{factor}")

    def b_matrices(self) -> list[Parameter]:
        """Return B of each projection."""
        return [self.parameter(projection, "B") for projection in self.target.hf_names()]

    def randomize_b(self, weights: Sequence[Tensor], size: float) -> None:
        """Fill B with random values so that the entries of ``s B A`` are about ``size`` times those of ``weights``.

        The size is a root mean square. Ranks that hold replicas of a parameter generate the same values.
        """
        rms = self._rms(weights)
        for projection, module in self.target.hf_names().items():
            a, b = (self.parameter(projection, factor) for factor in FACTORS)
            if self.target.is_split("B"):
                module = f"{module} {dist.get_rank(self._tp)}"
            if self._is_expert:
                module = f"{module} {dist.get_rank(self._groups.ep)}"
            values = torch.randn(b.shape, generator=_generator(module)).to(b.device)
            # An entry of B A is a sum of ``rank`` products, so it grows with the root of the rank.
            b.copy_(values * (size * rms / (self._scale * self._rms([a]) * a.shape[-2] ** 0.5)))

    def _rms(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the root mean square of parameters of which tensor-parallel ranks hold parts or replicas."""
        squares = torch.stack([part.float().square().mean() for part in tensors]).mean()
        dist.all_reduce(squares, group=self._tp)
        return (squares / dist.get_world_size(self._tp)).sqrt()

    def joined_factors(self) -> tuple[Tensor, Tensor]:
        """Return A ``[n * rank, in]`` and B ``[out, n * rank]`` of all n projections, for Megatron's joined weight."""
        names = list(self.target.hf_names())
        rows = []
        width = 0
        for projection, size in self._sizes.items():
            if projection not in names:
                # A projection without an adapter has zeros in its rows of B.
                first = self.parameter(names[0], "B")
                rows.append(first.new_zeros(*first.shape[:-2], size, len(names) * first.shape[-1]))
                continue
            b = self.parameter(projection, "B")
            after = (len(names) - 1) * b.shape[-1] - width
            rows.append(torch.nn.functional.pad(b, (width, after)))
            width += b.shape[-1]
        a = torch.cat([self.parameter(name, "A") for name in names], -2)
        if not self._is_expert:
            return a, self.target.rule.join(rows, self._local_shape)
        # A rule joins along the first dimension, which is that of the experts here.
        return a, self.target.rule.join([part.movedim(0, -1) for part in rows], self._local_shape).movedim(-1, 0)

    def delta(self, expert: int = 0) -> Tensor:
        """Return ``s B A`` ``[out, in]`` in fp32 for this rank's part of the weight, or of a local expert's."""
        a, b = (part[expert] if self._is_expert else part for part in self.joined_factors())
        return self._scale * (b.float() @ a.float())

    def forward(self, x: Tensor, norm: FusedNorm | None, splits: Sequence[int] | None = None) -> Tensor:
        """Return the adapter's part of the layer's output.

        ``norm`` is that which the layer applies to its input ``x``, ``splits`` the number of tokens of each local
        expert.
        """
        if norm is not None:
            x = norm(x)
        a, b = self.joined_factors()
        if splits is not None:
            return self._expert_forward(x, a, b, splits)
        return self._exchange(self._scale * (x @ a.t())) @ b.t()

    def _exchange(self, low: Tensor) -> Tensor:
        """Exchange the low-rank product over tensor parallelism, for the tokens of the layer's output."""
        if self.target.rule.shard_dim is None:
            return low
        exchange: Any
        if self.target.is_split("B"):
            # Column-parallel: every rank needs the product of all tokens.
            exchange = copy_to_tensor_model_parallel_region
            if self._sequence_parallel:
                exchange = gather_from_sequence_parallel_region
        else:
            # Row-parallel: each rank has a summand of the product.
            exchange = reduce_from_tensor_model_parallel_region
            if self._sequence_parallel:
                exchange = reduce_scatter_to_sequence_parallel_region
        return exchange(low, group=self._tp)

    def _expert_forward(self, x: Tensor, a: Tensor, b: Tensor, splits: Sequence[int]) -> Tensor:
        """Compute the adapters of experts, whose tokens Megatron's dispatcher has gathered and will reduce.

        The dispatcher sums outputs, and gradients of inputs, over expert-tensor-parallel ranks. The gradients of the
        factor that is not split are summed here.
        """
        if self.target.is_split("B"):
            a = copy_to_tensor_model_parallel_region(a, group=self._tp)
        else:
            b = copy_to_tensor_model_parallel_region(b, group=self._tp)
        low = grouped_linear(x, splits, a.unbind(0))
        return grouped_linear(self._scale * low, splits, b.unbind(0))

    def sharded_parameters(self) -> dict[str, ShardedTensor | ShardedTensorFactory]:
        """Return the parameters for Megatron's checkpoints, by their names in this module."""
        names = product(self.target.hf_names(), FACTORS)
        return {f"{name}_{factor}": self._sharded_parameter(name, factor) for name, factor in names}

    def _sharded_parameter(self, projection: str, factor: Factor) -> ShardedTensor | ShardedTensorFactory:
        parameter, ep = self.parameter(projection, factor), self._groups.ep
        tp_replica = dist.get_rank(self._tp)
        offsets = [(0, dist.get_rank(ep), dist.get_world_size(ep))] if self._is_expert else []
        if self.target.is_split(factor):
            offsets.append((self.target.split_dim(factor, parameter), tp_replica, dist.get_world_size(self._tp)))
            # Each rank of the group stores another part, so none is a replica.
            tp_replica = 0
        key = self.target.key(projection, factor)
        data_rank = dist.get_rank(self._groups.edp if self._is_expert else self._groups.dp_cp)
        replica = (0, tp_replica, data_rank)
        sections = self.target.cut(projection, factor, parameter)
        if len(sections) == 1:
            return ShardedTensor.from_rank_offsets(key, parameter, *offsets, replica_id=replica)
        dim = self.target.split_dim(factor, parameter)

        # Sections of their own, so that a checkpoint continues under another tensor-parallel size.
        def build(
            key: str, tensor: Tensor, replica_id: ReplicaId, flattened_range: slice | None
        ) -> list[ShardedTensor]:
            assert flattened_range is None
            return [
                ShardedTensor.from_rank_offsets(f"{key}.{i}", part, *offsets, replica_id=replica_id)
                for i, part in enumerate(self.target.cut(projection, factor, tensor))
            ]

        return ShardedTensorFactory(key, parameter, build, lambda parts: torch.cat(parts, dim), replica)


def kaiming_uniform(rank: int, columns: int, name: str) -> Tensor:
    """Return A ``[rank, columns]`` as PEFT initializes it (kaiming_uniform, a = sqrt(5)), seeded by ``name``."""
    bound = 1 / math.sqrt(columns)
    return torch.empty(rank, columns).uniform_(-bound, bound, generator=_generator(name))


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big"))
