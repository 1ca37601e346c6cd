"""Gated delta net (linear attention) for packed rows and context parallelism: Megatron's layer with another forward.

Reason: Megatron's ``GatedDeltaNet`` needs CUDA kernels (flash-linear-attention), and its norm of a head's output is
    zero-centered if the others are. 0.16.1 supports neither packed rows nor context parallelism.
Affected: Megatron Core 0.16.1 to 0.19.2.
Delete when: Megatron computes packed rows without these kernels, and that norm is like the model's.

Parameters, their names and their checkpoints are Megatron's. Only what lies between its two projections is replaced.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from torch.nn import Parameter

from megatron_dppo.mcore.delta_rule import choose_kernels
from megatron_dppo_megatron_cpu.attention import PackedRow
from megatron_dppo_megatron_cpu.context import ContextShard
from megatron_dppo_megatron_cpu.layers import weight_device


class OutputNorm(torch.nn.Module):
    """Weight of the RMSNorm of each head. All tensor-parallel ranks have it, and each rank has other heads."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        # Megatron passes its default here; the model's value is in the config.
        del eps
        self.eps = config.layernorm_epsilon
        self.gate = choose_kernels(config).gate
        self.weight = Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=weight_device(config)))

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        """Return the norm of ``x [..., hidden_size]`` times SiLU of the gates. The norm is not zero-centered."""
        # Megatron sums the gradients of norms over tensor-parallel ranks only under sequence parallelism, so the sum
        # is part of this backward pass.
        return self.gate(x, gates, copy_to_tensor_model_parallel_region(self.weight), self.eps)


class PackedGatedDeltaNet(GatedDeltaNet):
    """Megatron's gated delta net for packed rows on any device.

    With context parallelism each rank computes the whole row for a part of the heads: a state depends on all tokens
    before it, and heads do not depend on each other.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Megatron raises an ImportError without the kernels, which ``choose_kernels`` finds itself.
        GatedDeltaNet.__init__.__globals__["HAVE_FLA"] = True
        super().__init__(*args, **kwargs)
        self._kernels = choose_kernels(self.config)
        sizes = self.qk_dim, self.qk_dim, self.v_dim, self.v_dim, self.num_value_heads, self.num_value_heads
        self._sections = [size // self.tp_size for size in sizes]

    def _setup_variant_attrs(self) -> None:
        # Core 0.19 alone calls this, and requires a kernel.
        super()._setup_variant_attrs()
        self.gated_delta_rule = choose_kernels(self.config).mix

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, packed_seq_params: Any = None, **_: object
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the layer for ``hidden_states [T, 1, hidden_size]`` of a ``PackedRow``; return the same shape."""
        del attention_mask
        if not isinstance(packed_seq_params, PackedRow):
            raise ValueError("Expected packed rows. Fix: pass packed_seq_params=PackedRow.from_batch(batch, starts).")
        shard = packed_seq_params.shard
        projected = self.in_proj(hidden_states)[0].squeeze(1)
        if shard is not None:
            projected = shard.tokens_to_heads(projected, self._sections)
        mixed = self._mix(projected, packed_seq_params)
        if shard is not None:
            mixed = shard.heads_to_tokens(mixed)
        output: tuple[Tensor, Tensor | None] = self.out_proj(mixed[:, None])
        return output

    def _mix(self, projected: Tensor, row: PackedRow) -> Tensor:
        """Mix the tokens of each sequence.

        ``projected [T, columns]`` has queries, keys, values, output gates, beta and alpha of this rank's heads. Returns
        ``[T, num_value_heads * value_head_dim]``.
        """
        sizes = [size // (1 if row.shard is None else row.shard.group.size()) for size in self._sections]
        qkv, gates, beta, alpha = projected.split([sum(sizes[:3]), *sizes[3:]], -1)
        weight = _head_part(self.conv1d.weight.squeeze(1), self._sections[:3], row.shard)
        query, key, value = self._kernels.convolve(qkv, weight, row).split(sizes[:3], -1)
        query, key = (x.unflatten(-1, (-1, self.key_head_dim)) for x in (query, key))
        value, gates = (x.unflatten(-1, (-1, self.value_head_dim)) for x in (value, gates))
        heads = self._sections[5:]
        rate, bias = (_head_part(x, heads, row.shard) for x in (self.A_log, self.dt_bias))
        decay = -rate.float().exp() * F.softplus(alpha.float() + bias)
        output = self._kernels.mix(query, key, value, decay, beta.sigmoid(), row)
        return self.out_norm(output, gates).flatten(1)


def _head_part(parameter: Tensor, sections: Sequence[int], shard: ContextShard | None) -> Tensor:
    """Return the rows of a parameter that belong to this context-parallel rank's heads, as ``tokens_to_heads`` does."""
    if shard is None:
        return parameter
    size, rank = shard.group.size(), shard.group.rank()
    return torch.cat([kind.chunk(size)[rank] for kind in parameter.split(list(sections))])


def delta_net_spec(in_proj: type, out_proj: type) -> ModuleSpec:
    """Return the spec of linear attention. Its first norm is in ``in_proj``, as with Transformer Engine."""
    submodules = GatedDeltaNetSubmodules(in_proj=in_proj, out_norm=OutputNorm, out_proj=out_proj)
    return ModuleSpec(module=PackedGatedDeltaNet, submodules=submodules)
