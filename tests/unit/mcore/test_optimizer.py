"""Megatron's optimizer on one rank against Adam in float64: schedule, clipping, decay, loss scale, skipped updates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_dppo.config.model import ParallelConfig
from megatron_dppo.config.optimizer import OptimizerConfig
from megatron_dppo.mcore.shims import apply_shims
from megatron_dppo.parallel.platform import Platform

STEPS = 6
SHAPES = {"weight": (5, 3), "bias": (5,)}
SCALE = 8.0
"""Initial loss scale of fp16."""


@pytest.fixture
def one_rank() -> Iterator[None]:
    apply_shims(Platform.detect(force_cpu=True))
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@dataclass
class Adam:
    """AdamW in float64, one parameter at a time. Weight decay is for matrices alone."""

    parameters: dict[str, torch.Tensor]
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_grad: float
    num_updates: int = 0
    moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def step(self, gradients: dict[str, torch.Tensor]) -> float:
        """Update the parameters; returns the norm before clipping."""
        self.num_updates += 1
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
        factor = min(1.0, self.clip_grad / (norm + 1e-6)) if self.clip_grad > 0 else 1.0
        for name, parameter in self.parameters.items():
            gradient = factor * gradients[name]
            first, second = self.moments.get(name, (torch.zeros_like(gradient), torch.zeros_like(gradient)))
            first = self.betas[0] * first + (1 - self.betas[0]) * gradient
            second = self.betas[1] * second + (1 - self.betas[1]) * gradient.square()
            self.moments[name] = first, second
            mean = first / (1 - self.betas[0] ** self.num_updates)
            spread = (second / (1 - self.betas[1] ** self.num_updates)).sqrt() + self.eps
            decay = self.weight_decay if parameter.dim() > 1 else 0.0
            self.parameters[name] = parameter - self.lr * (mean / spread + decay * parameter)
        return norm


def build(dtype: str, settings: OptimizerConfig, *, distributed: bool) -> tuple[Any, Any]:
    """The optimizer and its chunk: a matrix and a bias."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule

    from megatron_dppo.mcore.optim import Optimizer, wrap_for_training

    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        bf16=dtype == "bf16",
        fp16=dtype == "fp16",
        params_dtype=torch_dtype,
    )
    module = MegatronModule(config)
    module.pre_process = module.post_process = True
    generator = torch.Generator().manual_seed(2)
    for name, shape in SHAPES.items():
        module.register_parameter(name, torch.nn.Parameter(torch.randn(shape, generator=generator).to(torch_dtype)))
    parallel = ParallelConfig(use_distributed_optimizer=distributed)
    chunks = wrap_for_training([module], config, parallel, grad_reduce_in_fp32=True)
    return Optimizer(chunks, config, settings, parallel, STEPS), chunks[0]


def parameters(chunk: Any) -> dict[str, torch.nn.Parameter]:
    return {name.rpartition(".")[2]: parameter for name, parameter in chunk.named_parameters()}


def set_gradients(optimizer: Any, chunk: Any, gradients: dict[str, torch.Tensor]) -> None:
    """Set the gradients of a backward pass, times the loss scale."""
    optimizer.zero_grad()
    scale = 1.0 if optimizer.loss_scale is None else optimizer.loss_scale.value
    for name, parameter in parameters(chunk).items():
        assert not parameter.main_grad.any(), "zero_grad left a gradient"
        parameter.main_grad.copy_(gradients[name] * scale)


def random_gradients(seed: int, size: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: size * torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def settings_for(**changes: Any) -> OptimizerConfig:
    values = {"lr": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_eps": 1e-3, "weight_decay": 0.3, "clip_grad": 2.0}
    return OptimizerConfig(**(values | changes))


def check_weights(chunk: Any, reference: Adam, dtype: str) -> None:
    """fp32 main parameters add up the updates; the weights of bf16 and fp16 are their rounding."""
    tolerance = {"fp32": 2e-6, "bf16": 2**-8, "fp16": 2**-11}[dtype]
    for name, parameter in parameters(chunk).items():
        expected = reference.parameters[name]
        error = (parameter.detach().double() - expected).abs() / expected.abs().clamp(min=1e-2)
        assert float(error.max()) < 1.2 * tolerance, (name, float(error.max()))


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_updates_are_those_of_adam_in_float64(dtype: str, distributed: bool, one_rank: None) -> None:
    """Some gradients are clipped, one is not finite and counts as no update, and new constants hold from then on."""
    from megatron_dppo.mcore.optim import AdamStep, optimizer_tensors

    scaled = {"initial_loss_scale": SCALE, "hysteresis": 1} if dtype == "fp16" else {}
    optimizer, chunk = build(dtype, settings_for(**scaled), distributed=distributed)
    start = {name: parameter.detach().double() for name, parameter in parameters(chunk).items()}
    reference = Adam(start, 0.1, (0.8, 0.95), 1e-3, 0.3, 2.0)
    for step, size in enumerate((0.1, 10.0, 0.3, math.inf, 0.2, 5.0)):
        gradients = random_gradients(step, 1.0 if math.isinf(size) else size)
        optimizer.set_step(step)
        before = [tensor.clone() for tensor in (*parameters(chunk).values(), *optimizer_tensors(optimizer))]
        if math.isinf(size):
            gradients["bias"][1] = math.inf
        if step == 5:
            changed = {"lr": 0.05, "betas": (0.5, 0.9), "eps": 1e-2, "weight_decay": 0.1, "clip_grad": 1.0}
            optimizer.set_adam(AdamStep(**changed))
            for name, value in changed.items():
                setattr(reference, name, value)
        set_gradients(optimizer, chunk, gradients)
        result = optimizer.step()
        if math.isinf(size):
            assert not result.applied and result.has_lower_scale == (dtype == "fp16")
            after = [*parameters(chunk).values(), *optimizer_tensors(optimizer)]
            assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True)), "weights or moments moved"
            continue
        assert result.applied and not result.has_lower_scale
        assert result.grad_norm == pytest.approx(reference.step(gradients), rel=1e-5)
        check_weights(chunk, reference, dtype)
    if dtype == "fp16":
        assert optimizer.loss_scale.value == SCALE / 2
    numbers = sum(math.prod(shape) for shape in SHAPES.values())
    assert sum(tensor.numel() for tensor in optimizer_tensors(optimizer)) == 3 * numbers, "weights and two moments"


@pytest.mark.parametrize("clip", [0.0, 1e6])
def test_a_gradient_below_the_limit_or_without_one_is_not_clipped(clip: float, one_rank: None) -> None:
    optimizer, chunk = build("fp32", settings_for(clip_grad=clip), distributed=False)
    start = {name: parameter.detach().double() for name, parameter in parameters(chunk).items()}
    # A large epsilon: without it the size of the gradient would not matter.
    reference = Adam(start, 0.1, (0.8, 0.95), 1e-3, 0.3, 0.0)
    gradients = random_gradients(0, 1e-3)
    for _ in range(2):
        set_gradients(optimizer, chunk, gradients)
        optimizer.set_step(0)
        assert optimizer.step().grad_norm == pytest.approx(reference.step(gradients), rel=1e-5)
        check_weights(chunk, reference, "fp32")


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 2, 9])
def test_rates_are_those_of_the_schedule_by_hand_in_any_order(decay: str, warmup: int, one_rank: None) -> None:
    settings = settings_for(lr=0.5, min_lr=0.1, lr_warmup_steps=warmup, lr_decay_style=decay)
    optimizer, _ = build("fp32", settings, distributed=True)
    # A warm-up may be longer than the run; the decay then is one step.
    length = max(STEPS, warmup + 1)
    for step in (3, 0, 5, 1, 4, 2, 5):
        done = step + 1
        progress = (done - warmup) / (length - warmup)
        if done <= warmup:
            expected = 0.5 * done / warmup
        elif decay == "linear":
            expected = 0.5 - 0.4 * progress
        else:
            expected = 0.5 if decay == "constant" else 0.1 + 0.2 * (1 + math.cos(math.pi * progress))
        assert optimizer.set_step(step) == pytest.approx(expected, rel=1e-9), step
        for part in optimizer.parts.values():
            assert [group["lr"] for group in part.param_groups] == pytest.approx([expected] * len(part.param_groups))
