"""Gated delta net (linear attention) in torch, for packed rows: Megatron's layer with another forward pass.

Reason: Megatron's ``GatedDeltaNet`` needs CUDA kernels (flash-linear-attention). Its own fallback in torch supports
    no packed rows, and 0.16.1 supports neither packed rows nor context parallelism.
Affected: Megatron Core 0.16.1 to 0.19.2 without Transformer Engine.
Delete when: Megatron computes packed rows without these kernels.

Parameters, their names and their checkpoints are Megatron's. Only what lies between its two projections is replaced.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from torch.nn import Parameter

from megatron_dppo.mcore.compat.attention import PackedRow
from megatron_dppo.mcore.compat.layers import LayerNormColumnParallelLinear, rms_norm, weight_device

_CHUNK_SIZE = 64
"""Tokens between two states of the recurrence, as in transformers and flash-linear-attention."""
_L2_EPS = 1e-6
"""Summand under the root of the norm of queries and keys, as in transformers."""


class OutputNorm(torch.nn.Module):
    """RMSNorm of each head. All tensor-parallel ranks have its weight, and each rank has other heads."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        # Megatron passes its default here; the model's value is in the config.
        del eps
        self.eps = config.layernorm_epsilon
        self.weight = Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=weight_device(config)))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x [..., hidden_size]``. The weight is not zero-centered, unlike those of the other norms."""
        # Megatron sums the gradients of norms over tensor-parallel ranks only under sequence parallelism, so the sum
        # is part of this backward pass.
        return rms_norm(x, copy_to_tensor_model_parallel_region(self.weight), self.eps)


class TorchGatedDeltaNet(GatedDeltaNet):
    """Megatron's gated delta net for packed rows on any device.

    Sequences of similar length are padded to ``[num_sequences, longest]`` and computed at once, as in
    ``SDPACoreAttention``. With context parallelism each rank gathers the row and runs the whole recurrence.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Megatron raises an ImportError without the kernels, which ``forward`` does not call here.
        GatedDeltaNet.__init__.__globals__["HAVE_FLA"] = True
        super().__init__(*args, **kwargs)
        self._local_sizes = [size // self.tp_size for size in (self.qk_dim, self.qk_dim, self.v_dim)]

    def _setup_variant_attrs(self) -> None:
        # Core 0.19 alone calls this, and requires a kernel.
        super()._setup_variant_attrs()
        self.gated_delta_rule = delta_rule

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, packed_seq_params: Any = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the layer for ``hidden_states [T, 1, hidden_size]`` of a ``PackedRow``; return the same shape."""
        del attention_mask
        if not isinstance(packed_seq_params, PackedRow):
            raise ValueError("Expected packed rows. Fix: pass packed_seq_params=PackedRow.from_batch(batch, starts).")
        projected = self.in_proj(hidden_states)[0].squeeze(1)
        shard = packed_seq_params.shard
        # A state depends on all tokens before it, so every context-parallel rank needs the whole row.
        if shard is not None:
            projected = shard.gather_for_partial(projected)
        layouts = [bucket.keys for bucket in packed_seq_params.buckets]
        mixed = torch.cat([layout.unpad(self._mix(layout.pad(projected))) for layout in layouts])
        tokens = torch.cat([layout.tokens for layout in layouts])
        mixed = torch.empty_like(mixed).index_copy(0, tokens, mixed)
        if shard is not None:
            mixed = shard.split(mixed)
        output: tuple[Tensor, Tensor | None] = self.out_proj(mixed[:, None])
        return output

    def _mix(self, projected: Tensor) -> Tensor:
        """Mix the tokens of each sequence.

        Args:
            projected: Queries, keys, values, output gates, beta and alpha of this tensor-parallel rank's heads
                ``[num_sequences, longest, rows]``.

        Returns:
            Output of all heads ``[num_sequences, longest, num_value_heads * value_head_dim]``.
        """
        channels, heads = sum(self._local_sizes), self.num_v_heads_local_tp
        qkv, gate, beta, alpha = projected.split([channels, self._local_sizes[2], heads, heads], -1)
        # Zeros before the first token make the convolution causal.
        qkv = F.pad(qkv.transpose(1, 2), (self.conv_kernel_dim - 1, 0))
        qkv = F.silu(F.conv1d(qkv, self.conv1d.weight, groups=channels)).transpose(1, 2)
        query, key, value = qkv.split(self._local_sizes, -1)
        query, key = (_l2_norm(x.unflatten(-1, (-1, self.key_head_dim))) for x in (query, key))
        value = value.unflatten(-1, (-1, self.value_head_dim))
        repeat = value.shape[2] // query.shape[2]
        query, key = query.repeat_interleave(repeat, 2), key.repeat_interleave(repeat, 2)
        decay = -self.A_log.float().exp() * F.softplus(alpha.float() + self.dt_bias)
        output = delta_rule(query, key, value, decay, beta.sigmoid())
        gate = gate.unflatten(-1, (-1, self.value_head_dim))
        gated = self.out_norm(output).float() * F.silu(gate.float())
        return gated.type_as(projected).flatten(-2)


def _l2_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)


def delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Compute the gated delta rule chunk by chunk (arXiv 2412.06464).

    Each head has a state ``S [d, e]`` that starts at zero. A token turns it into ``S' = exp(decay) S``, then into
    ``S' + k (beta (v - S'^T k))^T``. The output is ``S^T q / sqrt(d)``.

    Args:
        query: ``[batch, tokens, heads, d]``.
        key: ``[batch, tokens, heads, d]``.
        value: ``[batch, tokens, heads, e]``.
        decay: Logarithm of the factor of the state, at most 0. Shape ``[batch, tokens, heads]``.
        beta: Size of the update, from 0 to 1. Shape ``[batch, tokens, heads]``.

    Returns:
        Output ``[batch, tokens, heads, e]`` in fp32, or in float64 for float64 inputs.
    """
    dtype = torch.promote_types(value.dtype, torch.float32)
    tokens = value.shape[1]
    chunk = min(_CHUNK_SIZE, tokens)
    q, k, v = (_chunked(x.to(dtype), chunk) for x in (query, key, value))
    log_decay, beta = (_chunked(x.to(dtype)[..., None], chunk) for x in (decay, beta))
    q = q * q.shape[-1] ** -0.5
    # Decay from the start of the chunk to each token, and between two tokens of the chunk.
    since_start = log_decay.cumsum(-2)
    is_later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    between = (since_start - since_start.mT).masked_fill(is_later, -torch.inf).exp()

    # Each update depends on those before it in the chunk: a triangular system with ones on the diagonal. It is solved
    # for the values, and for what the state at the start of the chunk contributes.
    system = (k * beta) @ k.mT * between
    right = torch.cat([v * beta, k * beta * since_start.exp()], -1)
    solution = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, reads = solution.split([v.shape[-1], k.shape[-1]], -1)

    scores = q @ k.mT * between
    q = q * since_start.exp()
    to_end = since_start[..., -1:, :]
    k = k * (to_end - since_start).exp()
    state_factor = to_end.exp()
    state = v.new_zeros(*v.shape[1:3], k.shape[-1], v.shape[-1])
    outputs = []
    for i in range(len(v)):
        updates = values[i] - reads[i] @ state
        outputs.append(q[i] @ state + scores[i] @ updates)
        state = state * state_factor[i] + k[i].mT @ updates
    return torch.cat(outputs, 2)[:, :, :tokens].transpose(1, 2)


def _chunked(x: Tensor, chunk: int) -> Tensor:
    """Convert ``[batch, tokens, heads, d]`` to ``[chunks, batch, heads, chunk, d]``, zeros on the right."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % chunk))
    return x.unflatten(1, (-1, chunk)).permute(1, 0, 3, 2, 4)


def delta_net_spec() -> ModuleSpec:
    """Return the spec of linear attention. Its norm is in ``in_proj``, as with Transformer Engine."""
    submodules = GatedDeltaNetSubmodules(
        in_proj=LayerNormColumnParallelLinear, out_norm=OutputNorm, out_proj=RowParallelLinear
    )
    return ModuleSpec(module=TorchGatedDeltaNet, submodules=submodules)
