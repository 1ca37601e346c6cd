"""``[model]``, ``[lora]``, ``[parallel]``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import Field, model_validator

from megatron_dppo.config.section import DType, Section
from megatron_dppo.config.section import Section as _Section

if TYPE_CHECKING:
    pass


LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


LORA_TARGETS: tuple[LoraTarget, ...] = get_args(LoraTarget)


_ALPHA_OF_RANK = 2.0


class LoraConfig(Section):
    """Low-rank adapters; all else is frozen, also embeddings, output layer, norms and routers (docs/lora.md)."""

    rank: int = Field(0, ge=0)
    """Of each adapter; 0 = none, all weights are trained."""
    alpha: float | None = Field(None, gt=0)
    """A weight becomes W + alpha / rank * B A; None = 2 * rank."""
    target_modules: list[LoraTarget] = Field(default_factory=lambda: list(LORA_TARGETS), min_length=1)
    """Which linear layers, in PEFT's names: of attention, and of MLPs, experts (each expert has adapters of its own)
    and shared experts."""

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return _ALPHA_OF_RANK if self.alpha is None else self.alpha / self.rank

    @model_validator(mode="after")
    def _has_effect(self) -> LoraConfig:
        changed = self.changed_keys()
        if changed and not self.rank:
            raise ValueError(f"lora.{changed[0]} = {getattr(self, changed[0])!r} has no effect with rank = 0; set rank")
        twice = sorted({name for name in self.target_modules if self.target_modules.count(name) > 1})
        if twice:
            raise ValueError(f"lora.target_modules names {', '.join(twice)} more than once")
        return self


class ModelConfig(_Section):
    """The policy."""

    path: str
    """Hugging Face folder: config.json, tokenizer files and, unless ``random_init``, safetensors weights."""
    random_init: bool = False
    """Start from random weights drawn by the folder's config (only with a warm-up, or for tests)."""
    reference_path: str | None = None
    """Hugging Face folder of the reference policy of ``loss.kl_coef`` and ``reward.kl_coef``; None = the policy as it
    is before RL."""
    dtype: DType = "bf16"
    """Parameter dtype of training."""
    fused_head: bool = True
    """Output layer, statistics and loss gradient in one chunked pass; False = the whole logits, for comparison."""
    transformer: dict[str, Any] = Field(default_factory=dict)
    """Further fields of Megatron's TransformerConfig, by Megatron's name."""


class ParallelConfig(_Section):
    """Parallel layout, in Megatron's words."""

    tensor_model_parallel_size: int = Field(1, ge=1)
    """Ranks that split each weight and the vocabulary."""
    pipeline_model_parallel_size: int = Field(1, ge=1)
    """Stages that split the layers."""
    virtual_pipeline_model_parallel_size: int | None = Field(None, ge=1)
    """Chunks of layers per stage (interleaved pipeline)."""
    context_parallel_size: int = Field(1, ge=1)
    """Ranks that split each sequence."""
    expert_model_parallel_size: int = Field(1, ge=1)
    """Ranks that split the experts among them."""
    expert_tensor_parallel_size: int | None = Field(None, ge=1)
    """None = tensor_model_parallel_size when the expert parallel size is 1, else 1."""
    sequence_parallel: bool | None = None
    """None = on exactly when the tensor parallel size is above 1."""
    use_distributed_optimizer: bool = True
    """Split the optimizer state over data parallelism."""
    overlap_grad_reduce: bool = False
    """Reduce gradients behind the backward pass."""
    overlap_param_gather: bool = False
    """Gather updated weights behind the next forward pass; needs the two above."""
    overlap_p2p_comm: bool | None = None
    """None = on exactly with an interleaved pipeline (required there)."""
