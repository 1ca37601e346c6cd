"""Latent attention (MLA) without Transformer Engine: Megatron's own, with latents that are whole on every rank."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_data_parallel_rng_tracker_name
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from torch import Tensor
from torch.nn import Parameter

from megatron_dppo.mcore.compat.layers import device_of


class ReplicatedLinear(torch.nn.Module):
    """A linear layer that every rank of tensor parallelism has whole, as Transformer Engine's ``duplicated`` one.

    Each rank computes its own tokens under sequence parallelism; the mark ``sequence_parallel`` sums the gradient.
    """

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, init_method: Any, bias: bool, **_: Any
    ) -> None:
        super().__init__()
        if bias:
            raise ValueError("ReplicatedLinear has no bias")
        self.weight = Parameter(
            torch.empty(output_size, input_size, dtype=config.params_dtype, device=device_of(config))
        )
        if config.perform_initialization:
            with get_cuda_rng_tracker().fork(get_data_parallel_rng_tracker_name()):
                init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """``x [..., in]`` to ``[..., out]``."""
        return torch.nn.functional.linear(x, self.weight), None


_LAYERS = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")


class LatentAttention(MLASelfAttention):
    """Megatron's, with exactly the layers that its spec names.

    0.19 chooses some of them itself: Transformer Engine's, with a norm in it for queries that are made of no latent
    (Moonlight), which is another model.
    """

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        """What 0.19 asks for."""
        return {name: getattr(submodules, name) for name in _LAYERS}


def replicate_latents() -> None:
    """A shim: Megatron takes ``ReplicatedLinear`` where it takes Transformer Engine's layer."""
    multi_latent_attention.TELinear = ReplicatedLinear
