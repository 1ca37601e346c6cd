"""The gated delta rule and what surrounds it in a layer, over packed rows: in torch, and by kernels for CUDA.

Both have the same interface (``DeltaNetKernels``), so one layer serves every device. flash-linear-attention's kernels
know where sequences start (``cu_seqlens``). In torch the sequences are padded in groups of similar length.
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_dppo.errors import ConfigError
from megatron_dppo.mcore.delta_versions import FIX, miscompiles_delta_rule
from megatron_dppo_megatron_cpu.attention import PackedRow
from megatron_dppo_megatron_cpu.layers import rms_norm

FLA = "fla-core[cuda]>=0.6"
"""Package of the kernels, as pip takes it (flash-linear-attention)."""
CHUNK_SIZE = 64
"""Tokens between two states of the recurrence, as in transformers and flash-linear-attention."""
_L2_EPS = 1e-6
"""Summand under the root of the norm of queries and keys, as in transformers."""


class DeltaNetKernels(NamedTuple):
    """Functions of a layer with a gated delta net. T tokens of one packed row, the heads of one rank."""

    convolve: Callable[[Tensor, Tensor, PackedRow], Tensor]
    """Causal convolution of each channel within its sequence, then SiLU: inputs ``[T, channels]`` and weight
    ``[channels, width]`` to ``[T, channels]``."""
    mix: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, PackedRow], Tensor]
    """The rule: queries and keys ``[T, key_heads, d]`` without norm, values ``[T, heads, e]``, decay and beta
    ``[T, heads]`` to ``[T, heads, e]``. A sequence starts with an empty state."""
    gate: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    """RMSNorm of ``[..., e]`` with weight ``[e]`` and a summand under the root, times SiLU of a gate ``[..., e]``."""


def has_fla() -> bool:
    """Return True if flash-linear-attention is installed."""
    return importlib.util.find_spec("fla") is not None


def choose_kernels(config: TransformerConfig) -> DeltaNetKernels:
    """Return flash-linear-attention's kernels on CUDA in bf16 and fp16, if they are installed; else those in torch.

    The kernels round fp32 products to TF32, and their sums have no fixed order (``deterministic_mode``).
    """
    on_cuda = not config.use_cpu_initialization
    is_half = config.params_dtype in (torch.bfloat16, torch.float16)
    if on_cuda and is_half and not config.deterministic_mode and has_fla():
        if miscompiled := find_miscompiling_triton():
            raise ConfigError(
                f"{miscompiled} computes wrong gradients of linear attention on this GPU. Fix: {FIX}; or uninstall "
                "fla-core, then the layers run in torch, which is slower"
            )
        return fla_kernels()
    return TORCH_KERNELS


def find_miscompiling_triton() -> str | None:
    """Return the name of a Triton that miscompiles the kernels for this process's device."""
    version = importlib.metadata.version("triton")
    has_tilelang = importlib.util.find_spec("tilelang") is not None
    wrong = miscompiles_delta_rule(version, torch.cuda.get_device_capability(), has_tilelang=has_tilelang)
    return f"triton {version}" if wrong else None


def fla_kernels() -> DeltaNetKernels:
    """Return flash-linear-attention's kernels (``fla.ops.gated_delta_rule``, ``fla.modules``)."""
    from fla.modules.convolution import causal_conv1d
    from fla.modules.fused_norm_gate import rms_norm_gated
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def convolve(x: Tensor, weight: Tensor, row: PackedRow) -> Tensor:
        starts, host_starts = row.cu_seqlens_q, row.host_cu_seqlens
        output, _ = causal_conv1d(x[None], weight, activation="silu", cu_seqlens=starts, cu_seqlens_cpu=host_starts)
        return output[0]

    def mix(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, row: PackedRow) -> Tensor:
        output, _ = chunk_gated_delta_rule(
            query[None],
            key[None],
            value[None],
            g=decay[None],
            beta=beta[None],
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=row.cu_seqlens_q,
            cu_seqlens_cpu=row.host_cu_seqlens,
        )
        return output[0]

    def gate(x: Tensor, gates: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm_gated(x, gates, weight, None, eps=eps)

    return DeltaNetKernels(convolve, mix, gate)


def _convolve(x: Tensor, weight: Tensor, row: PackedRow) -> Tensor:
    assert row.positions is not None
    dtype = torch.promote_types(x.dtype, torch.float32)
    inputs, weights = x.to(dtype), weight.to(dtype)
    width = weights.shape[1]
    output = inputs * weights[:, -1]
    for distance in range(1, width):
        # What came before the sequence belongs to another one.
        earlier = F.pad(inputs, (0, 0, distance, 0))[: len(inputs)]
        earlier = earlier.masked_fill((row.positions < distance)[:, None], 0)
        output = output + earlier * weights[:, width - 1 - distance]
    return F.silu(output.type_as(x))


def _mix(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, row: PackedRow) -> Tensor:
    repeat = value.shape[1] // key.shape[1]
    query, key = (l2_norm(x).repeat_interleave(repeat, 1) for x in (query, key))
    layouts = [bucket.keys for bucket in row.buckets]
    outputs = []
    for layout in layouts:
        padded = [layout.pad(x) for x in (query, key, value, decay, beta)]
        outputs.append(layout.unpad(delta_rule(*padded)))
    output = torch.cat(outputs)
    tokens = torch.cat([layout.tokens for layout in layouts])
    return torch.empty_like(output).index_copy(0, tokens, output).type_as(value)


def _gate(x: Tensor, gates: Tensor, weight: Tensor, eps: float) -> Tensor:
    gated = rms_norm(x, weight, eps).float() * F.silu(gates.float())
    return gated.type_as(x)


def l2_norm(x: Tensor) -> Tensor:
    """Return the vectors of the last dimension with length 1, in fp32."""
    # The result is not rounded to the dtype of x: in bf16 that would double the error of the rule. In fp16 the gradient
    # of the root of a small sum would overflow.
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    return exact * torch.rsqrt(exact.square().sum(-1, keepdim=True) + _L2_EPS)


def delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Compute the gated delta rule chunk by chunk (arXiv 2412.06464).

    Each head has a state ``S [d, e]`` that starts at zero. A token turns it into ``S' = exp(decay) S``, then into
    ``S' + k (beta (v - S'^T k))^T``. The output is ``S^T q / sqrt(d)``.

    Queries and keys are ``[batch, tokens, heads, d]``, values and the output ``[..., e]``; ``decay`` (at most 0) and
    ``beta`` (from 0 to 1) ``[batch, tokens, heads]``. The output is fp32, or float64 for float64 inputs.
    """
    dtype = torch.promote_types(value.dtype, torch.float32)
    tokens = value.shape[1]
    chunk = min(CHUNK_SIZE, tokens)
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
    # Iteration unbinds the chunks. An index would give each of them a gradient of the size of all.
    chunks = zip(q, k, values, reads, scores, state_factor, strict=True)
    for queries, keys, new, read, score, factor in chunks:
        updates = new - read @ state
        outputs.append(queries @ state + score @ updates)
        state = state * factor + keys.mT @ updates
    return torch.cat(outputs, 2)[:, :, :tokens].transpose(1, 2)


def _chunked(x: Tensor, chunk: int) -> Tensor:
    """Convert ``[batch, tokens, heads, d]`` to ``[chunks, batch, heads, chunk, d]``, zeros on the right."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % chunk))
    return x.unflatten(1, (-1, chunk)).permute(1, 0, 3, 2, 4)


TORCH_KERNELS = DeltaNetKernels(_convolve, _mix, _gate)
