"""The ``[optimizer]`` section, with Megatron's names."""

from typing import Literal, Self

from pydantic import Field, model_validator

from megatron_dppo.config.section import Section


class OptimizerConfig(Section):
    """Adam and its learning-rate schedule, with Megatron's names. The schedule counts rollout steps."""

    lr: float = Field(ge=0)
    """Peak learning rate. 0 runs everything but changes no weight."""
    min_lr: float = Field(0.0, ge=0)
    """Learning rate of the last step, with a decay. 0 leaves the last step without effect, and the run warns of it."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Steps of linear increase. The first step already has a rate above 0."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay, from the end of the warm-up to the last step. Step n of N (from 1) has the rate at n / N of
    the schedule. Megatron counts its iterations from 0, and so never uses the final rate."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay rate of Adam's first moment."""
    adam_beta2: float = Field(0.99, ge=0, lt=1)
    """Decay rate of Adam's second moment."""
    adam_eps: float = Field(1e-8, gt=0)
    """Constant added to Adam's denominator."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay (AdamW)."""
    clip_grad: float = Field(1.0, ge=0)
    """Maximum global gradient norm. 0 disables clipping."""
    initial_loss_scale: float = Field(16.0, gt=0)
    """Initial factor of the loss with fp16, which keeps small gradients from underflow. The loss here is a sum over
    tokens, so use a smaller scale than for a mean."""
    min_loss_scale: float = Field(2.0**-10, gt=0)
    """Lower limit of the loss scale with fp16."""
    loss_scale_window: int = Field(200, ge=1)
    """Updates in a row without overflow after which the loss scale doubles (fp16)."""
    hysteresis: int = Field(1, ge=1)
    """Overflows after which the loss scale is halved (fp16)."""
    grad_reduce_in_fp32: bool = True
    """Accumulate the gradients of micro-batches and ranks in fp32. false uses the dtype of the weights: with bf16 that
    halves memory and traffic, but rounds every sum."""
    use_precision_aware_optimizer: bool = False
    """Let the optimizer hold the fp32 copies of bf16 weights and read gradients from the accumulation buffer. Needs
    Transformer Engine or ``optimizer_cpu_offload``."""
    main_params_dtype: Literal["fp32", "fp16"] = "fp32"
    """Data type of these copies, with Transformer Engine. For fp32 it stores only the 16 bits that the bf16 weights
    lack."""
    exp_avg_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = "fp32"
    """Data type of Adam's first moment, with Transformer Engine."""
    exp_avg_sq_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = "fp32"
    """Data type of Adam's second moment, with Transformer Engine."""
    optimizer_cpu_offload: bool = False
    """Keep fp32 copies and moments in host memory and run the update on the CPU. Needs
    ``use_precision_aware_optimizer`` (``docs/parallelism.md``)."""
    optimizer_offload_fraction: float = Field(1.0, gt=0, le=1)
    """Fraction of the parameters that is offloaded."""
    overlap_cpu_optimizer_d2h_h2d: bool = False
    """Copy gradients and weights of some parameters while others are updated."""
    pin_cpu_grads: bool = True
    """Use page-locked host memory for gradients, which makes copies faster."""

    @model_validator(mode="after")
    def _min_below_lr(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr = {self.min_lr} is above lr = {self.lr}; lower min_lr")
        return self
