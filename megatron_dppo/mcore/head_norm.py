"""RMSNorm over all heads of queries or keys together, which tensor parallelism splits (OLMoE).

Megatron and Transformer Engine have norms over each head alone. This one is a layer of the spec with both.
"""

import torch
from megatron.core.parallel_state import get_tensor_model_parallel_rank
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn import Parameter

from megatron_dppo_megatron_cpu.layers import weight_device


class QueryNorm(torch.nn.Module):
    """RMSNorm over all query heads. Every rank has the whole weight and reads the part of its heads.

    The gradient of the other part is 0 then. With ``qk_layernorm`` Megatron sums the gradients of these norms over
    tensor parallelism, by their name, which makes the gradient complete.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        # Megatron passes its default here; the model's value is in the config.
        del eps
        self.eps = config.layernorm_epsilon
        self._tp_size = config.tensor_model_parallel_size
        size = self._num_heads(config) * hidden_size
        self.weight = Parameter(torch.ones(size, dtype=config.params_dtype, device=weight_device(config)))

    def _num_heads(self, config: TransformerConfig) -> int:
        return config.num_attention_heads

    def forward(self, x: Tensor) -> Tensor:
        """Normalize this rank's heads ``x [..., num_heads, head_dim]``: statistics in fp32, result in its dtype."""
        x32 = x.flatten(-2).float()
        # The mean is over the heads of all ranks, and so is the gradient that comes back through it.
        total = reduce_from_tensor_model_parallel_region(x32.square().mean(-1, keepdim=True))
        mean = copy_to_tensor_model_parallel_region(total) / self._tp_size
        weight = self.weight.chunk(self._tp_size)[get_tensor_model_parallel_rank()]
        return ((x32 * torch.rsqrt(mean + self.eps)).type_as(x) * weight).view_as(x)


class KeyNorm(QueryNorm):
    """RMSNorm over all key heads."""

    def _num_heads(self, config: TransformerConfig) -> int:
        assert config.num_query_groups is not None
        return config.num_query_groups
