"""The sections ``[model]``, ``[lora]`` and ``[parallel]``."""

from typing import Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from megatron_dppo.config.plausible import check_plausible
from megatron_dppo.config.section import DType, Section

_CommonTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_LinearTarget = Literal["in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
_LatentTarget = Literal["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]
_MixtralTarget = Literal["w1", "w2", "w3"]
LoraTarget = Literal[_CommonTarget, _LinearTarget, _LatentTarget, _MixtralTarget]

LORA_TARGETS: tuple[LoraTarget, ...] = get_args(_CommonTarget)

_DEFAULT_SCALE = 2.0
"""Value of ``alpha / rank`` if ``alpha`` is null."""


class LoraConfig(Section):
    """Low-rank adapters (docs/lora.md).

    Everything else is frozen, including embeddings, output layer, norms and routers.
    """

    rank: int = Field(0, ge=0)
    """Rank of each adapter. 0 disables adapters and trains all weights."""
    alpha: float | None = Field(None, gt=0)
    """Scale: a weight W becomes W + alpha / rank * B A. null uses 2 * rank."""
    target_modules: list[LoraTarget] = Field(default_factory=lambda: list(LORA_TARGETS), min_length=1)
    """Linear layers that get an adapter, by PEFT's names. They cover attention, MLPs, experts and shared experts. Each
    expert has its own adapter. Linear attention has further ones: in_proj_qkvz, in_proj_ba and out_proj in Qwen3-Next;
    in_proj_qkv, in_proj_z, in_proj_b, in_proj_a and out_proj in Qwen3.5. Latent attention has kv_a_proj_with_mqa,
    kv_b_proj, o_proj, and q_a_proj and q_b_proj or q_proj. Experts of Mixtral and MiniMax-M2 are w1, w2 and w3."""

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return _DEFAULT_SCALE if self.alpha is None else self.alpha / self.rank

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        changed = self.changed_keys()
        if changed and not self.rank:
            raise ValueError(f"lora.{changed[0]} = {getattr(self, changed[0])!r} has no effect with rank = 0; set rank")
        duplicates = sorted({name for name in self.target_modules if self.target_modules.count(name) > 1})
        if duplicates:
            raise ValueError(f"lora.target_modules lists {', '.join(duplicates)} more than once; list each module once")
        return self


class ModelConfig(Section):
    """The policy model."""

    path: str
    """Hugging Face folder with config.json, tokenizer files and, unless ``random_init``, safetensors weights."""
    provider: Literal["builtin", "megatron-bridge"] = "builtin"
    """Origin of the Megatron model and of the conversion of its weights. "builtin" has the families of docs/models.md.
    "megatron-bridge" is NVIDIA's package, for other models on GPUs; an export checks every load."""
    random_init: bool = False
    """Start from random weights with the folder's configuration. Only a teacher (``[distillation]``) can train them."""
    reference_path: str | None = None
    """Hugging Face folder of the reference policy for ``loss.kl_coef`` and ``reward.kl_coef``. null uses the policy's
    weights at the start of RL."""
    dtype: DType = "bf16"
    """Data type of the parameters in training."""
    fused_head: bool = True
    """Compute output layer, token statistics and loss gradient in one chunked pass, which never holds the full logits.
    false computes the full logits, for comparison."""
    fp32_head_gradient: bool = False
    """Never round the weight gradient of the output layer before it is added in fp32. GPUs never do. With bf16 weights,
    a CPU with fast bf16 products (AMX, or AMD with AVX512-BF16) rounds that of each part of the tokens to bf16 (2e-3),
    as autograd does; the product then takes about half the time."""
    transformer: dict[str, object] = Field(default_factory=dict)
    """Further fields of Megatron's TransformerConfig, by Megatron's names."""

    @field_validator("transformer")
    @classmethod
    def _numbers_are_plausible(cls, fields: dict[str, Any]) -> dict[str, Any]:
        for name, values in fields.items():
            for value in values if isinstance(values, list) else [values]:
                try:
                    check_plausible(name, value)
                except ValueError as error:
                    raise ValueError(f"{name} = {value!r}: {error}") from error
                if isinstance(value, (int, float)) and value < 0:
                    raise ValueError(f"{name} = {value!r}; expected no negative number")
        return fields


class ParallelConfig(Section):
    """Parallel layout, with Megatron's names."""

    tensor_model_parallel_size: int = Field(1, ge=1)
    """Number of ranks that split each weight and the vocabulary."""
    pipeline_model_parallel_size: int = Field(1, ge=1)
    """Number of pipeline stages that split the layers."""
    virtual_pipeline_model_parallel_size: int | None = Field(None, ge=1)
    """Number of layer chunks per pipeline stage (interleaved schedule). null uses the plain schedule."""
    context_parallel_size: int = Field(1, ge=1)
    """Number of ranks that split each sequence."""
    expert_model_parallel_size: int = Field(1, ge=1)
    """Number of ranks that divide the experts among themselves."""
    expert_tensor_parallel_size: int | None = Field(None, ge=1)
    """Number of ranks that split the weights of each expert. null uses ``tensor_model_parallel_size`` if the expert
    parallel size is 1, otherwise 1."""
    sequence_parallel: bool | None = None
    """Split activations along the sequence within a tensor-parallel group. null enables it if the tensor parallel size
    is above 1."""
    use_distributed_optimizer: bool = True
    """Shard the optimizer state across data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Overlap the gradient reduction with the backward pass."""
    overlap_param_gather: bool = False
    """Overlap the gathering of updated weights with the next forward pass. Needs ``use_distributed_optimizer`` and
    ``overlap_grad_reduce``."""
    overlap_p2p_comm: bool | None = None
    """Overlap the communication between pipeline stages with computation. null enables it for an interleaved pipeline,
    which requires it."""
