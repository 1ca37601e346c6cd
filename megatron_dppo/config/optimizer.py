"""The ``[optimizer]`` section, in Megatron's words."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megatron_dppo.config.section import Section


class OptimizerConfig(Section):
    """Adam and its schedule (counted in rollout steps), in Megatron's words."""

    lr: float = Field(ge=0)
    """Highest learning rate; 0 = everything runs, and no weight changes."""
    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the end of the decay."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Steps of linear increase; the first step already has a rate above 0."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """From the end of the warm-up to the last step."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.99, ge=0, lt=1)
    adam_eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    clip_grad: float = Field(1.0, ge=0)
    """Global gradient norm limit; 0 = no clipping."""
    initial_loss_scale: float = Field(16.0, gt=0)
    """Only fp16: what the loss is multiplied by at first, so that small gradients do not vanish. The loss is a sum over
    tokens here: a scale that is good for a mean is as many times too large."""
    min_loss_scale: float = Field(2.0**-10, gt=0)
    """Only fp16: overflows never lower it further."""
    loss_scale_window: int = Field(200, ge=1)
    """Only fp16: updates in a row without overflow, after which it is doubled."""
    hysteresis: int = Field(1, ge=1)
    """Only fp16: overflows before it is halved."""
    grad_reduce_in_fp32: bool = True
    """Add up the gradients of micro-batches and ranks in fp32; False = in the dtype of the weights, which halves their
    memory and traffic with bf16 and rounds every sum."""
    use_precision_aware_optimizer: bool = False
    """The optimizer itself holds the fp32 copies of bf16 weights and reads the gradients where they were added up.
    Needs Transformer Engine, or ``optimizer_cpu_offload``."""
    main_params_dtype: Literal["fp32", "fp16"] = "fp32"
    """Of these copies, by Transformer Engine; of fp32 it keeps the 16 bits that the bf16 weights have not."""
    exp_avg_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = "fp32"
    """Of the first moment, by Transformer Engine."""
    exp_avg_sq_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = "fp32"
    """Of the second moment, by Transformer Engine."""
    optimizer_cpu_offload: bool = False
    """Keep fp32 copies and moments in the memory of the host, and update there; needs
    ``use_precision_aware_optimizer`` (``docs/parallelism.md``)."""
    optimizer_offload_fraction: float = Field(1.0, gt=0, le=1)
    """Of the parameters that are offloaded."""
    overlap_cpu_optimizer_d2h_h2d: bool = False
    """Copy gradients and weights of some parameters while others are updated."""
    pin_cpu_grads: bool = True
    """Gradients on the host in page-locked memory, which is copied to faster."""

    @model_validator(mode="after")
    def _min_below_lr(self) -> OptimizerConfig:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr = {self.min_lr} is above lr = {self.lr}")
        return self


class WarmupOptimizerConfig(OptimizerConfig):
    """The same keys with the defaults of the embedded task; each can be set alone."""

    lr: float = Field(6e-3, gt=0)
    min_lr: float = Field(6e-4, ge=0)
    lr_warmup_steps: int = Field(20, ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine"] = "cosine"
    adam_beta2: float = Field(0.98, ge=0, lt=1)
    weight_decay: float = Field(0.01, ge=0)
