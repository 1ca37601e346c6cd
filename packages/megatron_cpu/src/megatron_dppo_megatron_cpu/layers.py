"""Pure-torch layers with the module tree and parameter names of Transformer Engine's.

Reason: Megatron's local layers lack RMSNorm under sequence parallelism, norms fused into linear layers, and grouped
linear layers for experts. Checkpoints, the Hugging Face mapping and parameter filters are the same as with Transformer
Engine:
``linear_qkv.{layer_norm_weight,weight}``, ``linear_proj.weight``, ``{q,k}_layernorm.weight``,
``pre_mlp_layernorm.weight``, ``mlp.router.weight``, ``mlp.experts.linear_fc{1,2}.weight{i}``.
Affected: Megatron Core 0.16.1 to 0.19.2 without Transformer Engine.
Delete when: Megatron has these layers without Transformer Engine.
"""

from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn import Parameter

from megatron_dppo_megatron_cpu.grouped_gemm import grouped_linear


def weight_device(config: TransformerConfig) -> torch.device:
    """Return the device on which layers create their weights.

    Without CUDA it is torch's default device: the CPU, or ``meta`` for a model without memory.
    """
    if config.use_cpu_initialization:
        return torch.get_default_device()
    return torch.device("cuda", torch.cuda.current_device())


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
    """Return ``x / rms(x) * weight`` over the last dimension: statistics in fp32, result in the dtype of ``x``.

    With ``zero_centered`` the weight is the difference from 1 (``layernorm_zero_centered_gamma``), and the product is
    rounded only once, as in transformers.
    """
    x32 = x.float()
    normalized = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    if zero_centered:
        return (normalized * (1 + weight.float())).type_as(x)
    return normalized.type_as(x) * weight


def _norm_weight(config: TransformerConfig, size: int) -> Parameter:
    weight = Parameter(torch.ones(size, dtype=config.params_dtype, device=weight_device(config)))
    # Makes ``finalize_model_grads`` sum its gradient over the tensor-parallel group.
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight


class RMSNorm(torch.nn.Module):
    """RMSNorm that supports sequence parallelism, which Megatron's ``WrappedTorchNorm`` rejects."""

    def __init__(self, config: TransformerConfig, hidden_size: int, **_: object) -> None:
        super().__init__()
        # Megatron passes its default of eps; the model's value is in the config.
        self.eps = config.layernorm_epsilon
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = _norm_weight(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x [..., hidden_size]``."""
        return rms_norm(x, self.weight, self.eps, zero_centered=self.zero_centered)


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm and a column-parallel linear in one module, as in Transformer Engine."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: object) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.eps = config.layernorm_epsilon
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.layer_norm_weight = _norm_weight(config, input_size)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Normalize, then multiply; shapes as in ``ColumnParallelLinear``."""
        normalized = rms_norm(x, self.layer_norm_weight, self.eps, zero_centered=self.zero_centered)
        return super().forward(normalized, *args, **kwargs)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the sharded state: weight and bias are sharded over dimension 0, the norm is replicated."""
        state = {k: v for k, v in self.state_dict(prefix="", keep_vars=True).items() if v is not None}
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0, "bias": 0}, sharded_offsets)


class _GroupedLinear(torch.nn.Module):
    """Linear layers of the local experts, with weights ``weight{i}`` ``[out, in]`` split over ``shard_dim``.

    With ``bias`` each has a ``bias{i}`` ``[out]``. As in Megatron, that excludes expert tensor parallelism.
    """

    shard_dim: int

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Any,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__()
        parts = pg_collection.expt_tp.size()
        if not is_expert or (bias and parts > 1):
            raise ValueError(
                "Expected is_expert = True, and expert tensor parallel size 1 with bias = True, for grouped linear "
                f"layers, got is_expert = {is_expert}, bias = {bias}, size {parts}."
            )
        self.num_gemms = num_gemms
        self.pg_collection = pg_collection
        self.skip_bias_add = skip_bias_add
        self.has_bias = bias
        shape = (output_size // parts, input_size) if self.shard_dim == 0 else (output_size, input_size // parts)
        for i in range(num_gemms):
            weight = Parameter(torch.empty(shape, dtype=config.params_dtype, device=weight_device(config)))
            if config.perform_initialization:
                with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                    init_method(weight)
            self._add_parameter(f"weight{i}", weight, self.shard_dim)
            if bias:
                zeros = torch.zeros(output_size, dtype=config.params_dtype, device=weight_device(config))
                self._add_parameter(f"bias{i}", Parameter(zeros), 0)

    def _add_parameter(self, name: str, parameter: Parameter, shard_dim: int) -> None:
        # Marks the parameter as split, so that the gradient norm counts every part, and every expert, once.
        set_tensor_model_parallel_attributes(parameter, True, shard_dim, 1)
        # As in Megatron: False makes DDP reduce the gradient over the expert-data-parallel group.
        parameter.allreduce = self.pg_collection.ep.size() == 1  # type: ignore[attr-defined]
        setattr(self, name, parameter)

    def forward(self, x: Tensor, m_splits: list[int]) -> tuple[Tensor, list[Tensor] | None]:
        """Multiply tokens ``[sum(m_splits), in]``, sorted by expert, by their expert's weight.

        Biases are added, or with ``skip_bias_add`` returned beside the products.
        """
        output = grouped_linear(x, m_splits, [getattr(self, f"weight{i}") for i in range(self.num_gemms)])
        if not self.has_bias:
            return output, None
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)]
        if self.skip_bias_add:
            return output, biases
        parts = zip(torch.split(output, m_splits), biases, strict=True)
        return torch.cat([part + bias for part, bias in parts]), None

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are never delayed, as Transformer Engine can do."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the sharded state. Local expert i is global expert ``ep_rank * num_gemms + i``."""
        if metadata is None:
            raise ValueError("Expected metadata with 'dp_cp_group' in sharded_state_dict, got None.")
        groups = self.pg_collection
        first, total = groups.ep.rank() * self.num_gemms, groups.ep.size() * self.num_gemms
        result = {}
        kinds = {"weight": self.shard_dim} | ({"bias": 0} if self.has_bias else {})
        for i in range(self.num_gemms):
            sharded = make_sharded_tensors_for_checkpoint(
                {f"{i}.{kind}": getattr(self, f"{kind}{i}") for kind in kinds},
                "",
                {f"{i}.{kind}": dim for kind, dim in kinds.items()},
                (*sharded_offsets, (len(sharded_offsets), first + i, total)),
                tp_group=groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(sharded, f"{i}.", prefix)
            for kind in kinds:
                # Replicas of an expert are in the expert-data-parallel group, not in ``dp_cp_group``.
                tensor = sharded[f"{i}.{kind}"]
                tensor.replica_id = (*tensor.replica_id[:2], groups.expt_dp.rank())
                result[f"{prefix}{kind}{i}"] = tensor
        return result


class ColumnParallelGroupedLinear(_GroupedLinear):
    """First layer of the experts: outputs are split over expert tensor parallelism."""

    shard_dim = 0


class RowParallelGroupedLinear(_GroupedLinear):
    """Second layer of the experts: inputs are split over expert tensor parallelism."""

    shard_dim = 1
