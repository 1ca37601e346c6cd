"""Multi-latent attention (MLA) without Transformer Engine: Megatron's, with replicated down projections.

Reason: MLA supports replicated latents only with Transformer Engine's layer. With Megatron's split layers a rank's part
    of the gradient of the rotated keys is lost under tensor parallelism.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_data_parallel_rng_tracker_name
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from torch import Tensor
from torch.nn import Parameter

from megatron_dppo_megatron_cpu.layers import weight_device


class ReplicatedLinear(torch.nn.Module):
    """Linear layer replicated on all tensor-parallel ranks, as Transformer Engine's mode ``duplicated``.

    With sequence parallelism each rank computes its tokens. The attribute ``sequence_parallel`` of the weight makes
    ``finalize_model_grads`` sum its gradient.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], object],
        bias: bool,
        **_: object,
    ) -> None:
        super().__init__()
        if bias:
            raise ValueError("Expected bias = False for ReplicatedLinear, got True.")
        self.weight = Parameter(
            torch.empty(output_size, input_size, dtype=config.params_dtype, device=weight_device(config))
        )
        if config.perform_initialization:
            # This random state is the same on all tensor-parallel ranks, so the replicas start equal.
            with get_cuda_rng_tracker().fork(get_data_parallel_rng_tracker_name()):
                init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Multiply ``x [..., in]`` by the weight; return ``[..., out]`` and no bias."""
        return torch.nn.functional.linear(x, self.weight), None


_QK_NORM_LAYERS = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")


class LatentAttention(MLASelfAttention):
    """Megatron's MLASelfAttention with exactly the layers that its spec names.

    Reason: 0.19 chooses some layers itself. It takes Transformer Engine's layer with a norm for queries without a
        latent (Moonlight), which is another model.
    Affected: Megatron Core 0.19.
    Delete when: MLASelfAttention uses the layers of its spec.
    """

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        """Return the layers of the spec; called by Megatron Core 0.19."""
        return {name: getattr(submodules, name) for name in _QK_NORM_LAYERS}


def replicate_latents() -> None:
    """Make MLA accept ``ReplicatedLinear`` in place of Transformer Engine's layer (see the module's docstring)."""
    multi_latent_attention.TELinear = ReplicatedLinear
