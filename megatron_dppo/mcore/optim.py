"""Megatron's DDP, optimizer and learning-rate schedule around the model chunks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.grad_scaler import MegatronGradScaler
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megatron_dppo.config.model import ParallelConfig
from megatron_dppo.config.optimizer import OptimizerConfig
from megatron_dppo.mcore.mapping import preserve_router_biases
from megatron_dppo.mcore.offload import drop_gradient_copies, is_offloaded, offloaded_tensors, start_offloaded
from megatron_dppo.mcore.optimizer_shards import use_box_sharding
from megatron_dppo.parallel.platform import DTYPES


class LossScale(MegatronGradScaler):
    """Halves the scale after an overflow, and doubles it after many updates without one.

    Args:
        settings: the first scale, the lowest one, and how many updates go by.
        device: of the gradients.
    """

    def __init__(self, settings: OptimizerConfig, device: torch.device) -> None:
        self._scale = torch.tensor([settings.initial_loss_scale], dtype=torch.float, device=device)
        self._lowest, self._window = settings.min_loss_scale, settings.loss_scale_window
        self._patience = settings.hysteresis
        self._without, self._left = 0, settings.hysteresis

    @property
    def value(self) -> float:
        """The scale."""
        return float(self._scale)

    @property
    def scale(self) -> Tensor:
        """``[1]``."""
        return self._scale

    @property
    def inv_scale(self) -> Tensor:
        """``[1]``."""
        return self._scale.double().reciprocal().float()

    def update(self, found_inf: bool) -> None:
        """A part of the optimizer has looked at its gradients; ``adjust`` decides when all have."""

    def adjust(self, *, overflow: bool) -> bool:
        """The scale after an update that all ranks know to have overflowed or not; False = there is none lower."""
        if not overflow:
            self._without += 1
            if self._without == self._window:
                self._without, self._left = 0, self._patience
                self._scale *= 2
            return True
        self._without, self._left = 0, self._left - 1
        if self._left > 0:
            return True
        lowered = max(self.value / 2, self._lowest)
        has_lower = lowered < self.value
        self._scale.fill_(lowered)
        return has_lower

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"scale": self.value, "without": self._without, "left": self._left}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on as when it was written."""
        self._scale.fill_(state_dict["scale"])
        self._without, self._left = state_dict["without"], state_dict["left"]


def wrap_float16(config: TransformerConfig, chunks: Sequence[GPTModel]) -> list[Any]:
    """Each chunk in the dtype of the configuration: in a Float16Module for bf16 and fp16."""
    with preserve_router_biases(chunks):
        return [Float16Module(config, chunk) if config.bf16 or config.fp16 else chunk for chunk in chunks]


def wrap_for_training(
    chunks: Sequence[GPTModel], config: TransformerConfig, parallel: ParallelConfig, *, grad_reduce_in_fp32: bool
) -> list[DistributedDataParallel]:
    """Megatron's DistributedDataParallel around each chunk (and Float16Module below it for bf16 and fp16)."""
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        grad_reduce_in_fp32=grad_reduce_in_fp32,
    )
    modules = wrap_float16(config, chunks)
    return [
        DistributedDataParallel(config, ddp_config, module, disable_bucketing=(i > 0))
        for i, module in enumerate(modules)
    ]


class Update(NamedTuple):
    """What became of an update; equal on all ranks."""

    applied: bool
    grad_norm: float
    """before clipping"""
    has_lower_scale: bool = False
    """it overflowed in fp16, and the next ones have a lower scale"""


class Optimizer:
    """Megatron's optimizer with its schedule, counted in steps of the caller.

    Args:
        chunks: DDP-wrapped model chunks with their final initial weights.
        config: the model's TransformerConfig; its gradient hooks are set here.
        optimizer: learning rate, schedule and Adam's constants.
        parallel: distributed optimizer and overlap switches.
        total_steps: length of the schedule.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        config: TransformerConfig,
        optimizer: OptimizerConfig,
        parallel: ParallelConfig,
        total_steps: int,
    ) -> None:
        self._chunks = list(chunks)
        self.megatron = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=optimizer.lr,
                min_lr=optimizer.min_lr,
                weight_decay=optimizer.weight_decay,
                adam_beta1=optimizer.adam_beta1,
                adam_beta2=optimizer.adam_beta2,
                adam_eps=optimizer.adam_eps,
                clip_grad=optimizer.clip_grad,
                bf16=config.bf16,
                fp16=config.fp16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=parallel.use_distributed_optimizer,
                overlap_param_gather=parallel.overlap_param_gather,
                **_memory_settings(optimizer, config),
            ),
            self._chunks,
        )
        self.loss_scale = LossScale(optimizer, next(chunks[0].parameters()).device) if config.fp16 else None
        # Megatron allocates the moments at the first update; a checkpoint before it would fail for want of them.
        for part in self.megatron.chained_optimizers:
            if is_offloaded(part):
                start_offloaded(part)
            elif not part.is_stub_optimizer:
                part.init_state_fn(part.optimizer, part.config)
            if isinstance(part, DistributedOptimizer):
                use_box_sharding(part)
            if self.loss_scale is not None:
                part.grad_scaler = self.loss_scale
        self._scheduler = OptimizerParamScheduler(
            self.megatron,
            init_lr=0.0,
            max_lr=optimizer.lr,
            min_lr=optimizer.min_lr,
            lr_warmup_steps=optimizer.lr_warmup_steps,
            lr_decay_steps=max(total_steps, optimizer.lr_warmup_steps + 1),
            lr_decay_style=optimizer.lr_decay_style,
            start_wd=optimizer.weight_decay,
            end_wd=optimizer.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,
        )
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.megatron.scale_loss
        if parallel.overlap_grad_reduce:
            hooks = [chunk.no_sync for chunk in self._chunks]
            config.no_sync_func = hooks if len(hooks) > 1 else hooks[0]
            if len(hooks) > 1:
                config.grad_sync_func = [chunk.start_grad_sync for chunk in self._chunks]

    def zero_grad(self) -> None:
        """Clear the gradient buffers."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget what the last update left beside the gradient buffers, such as fp32 copies of bf16 gradients."""
        self.megatron.zero_grad()
        for part in self.megatron.chained_optimizers:
            if is_offloaded(part):
                drop_gradient_copies(part)

    def set_step(self, step: int) -> float:
        """Set the learning rate of ``step`` (from 0; the first step already has a non-zero rate) and return it.

        The rate is a function of the step alone, so that a resumed run needs no scheduler state.
        """
        self._scheduler.num_steps = step
        self._scheduler.step(increment=1)
        return float(self.megatron.param_groups[0]["lr"])

    def step(self) -> Update:
        """Update the weights unless the global gradient norm is not finite."""
        found_inf, norm = self.megatron.prepare_grads(), self.megatron.get_grad_norm()
        overflow = not math.isfinite(norm)
        has_lower = self.loss_scale is not None and self.loss_scale.adjust(overflow=overflow)
        if overflow:
            return Update(False, float(norm), has_lower)
        with _known(self.megatron, prepare_grads=found_inf, get_grad_norm=norm):
            applied, _, _ = self.megatron.step()
        return Update(bool(applied), float(norm))

    def finish_overlapped_gather(self) -> None:
        """Wait for parameters that are still being gathered behind the next forward pass."""
        for chunk in self._chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def sharded_state_dict(self, model_state: dict[str, Any], *, is_loading: bool, metadata: dict[str, Any]) -> Any:
        """Megatron's sharded optimizer state for dist_checkpointing."""
        return self.megatron.sharded_state_dict(model_state, is_loading=is_loading, metadata=metadata)

    def load_state_dict(self, state: Any) -> None:
        """Take the state of a checkpoint. Rates, betas and weight decay stay those of this run's configuration."""
        parts = [part.optimizer for part in self.megatron.chained_optimizers if not part.is_stub_optimizer]
        own = [[{k: v for k, v in g.items() if k not in _OF_STATE} for g in part.param_groups] for part in parts]
        self.megatron.load_state_dict(state)
        for part, groups in zip(parts, own, strict=True):
            for group, settings in zip(part.param_groups, groups, strict=True):
                group.update(settings)


_OF_STATE = ("params", "step")
"""What of a parameter group is no setting: Megatron keeps the number of updates there."""


def optimizer_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    """What the optimizer holds on this rank: its parameters (the fp32 copies, where it has some) and their state."""
    for part in optimizer.megatron.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        if is_offloaded(part):  # its parameters are the weights of the model
            yield from _filled(offloaded_tensors(part))
            continue
        for group in part.optimizer.param_groups:
            yield from _filled(group["params"])
        for state in part.optimizer.state.values():
            yield from _filled(state.values())


def _memory_settings(optimizer: OptimizerConfig, config: TransformerConfig) -> dict[str, Any]:
    """Megatron's settings of what the optimizer keeps, in which dtype and where."""
    if not optimizer.use_precision_aware_optimizer:
        return {}
    names = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    return {
        "use_precision_aware_optimizer": True,
        "main_grads_dtype": torch.float32 if optimizer.grad_reduce_in_fp32 else config.params_dtype,
        **{name: _DTYPES[getattr(optimizer, name)] for name in names},
        "optimizer_cpu_offload": optimizer.optimizer_cpu_offload,
        "optimizer_offload_fraction": optimizer.optimizer_offload_fraction,
        "overlap_cpu_optimizer_d2h_h2d": optimizer.overlap_cpu_optimizer_d2h_h2d,
        "pin_cpu_grads": optimizer.pin_cpu_grads,
    }


_DTYPES = DTYPES | {"fp16": torch.float16, "fp8": torch.uint8}
"""As Transformer Engine's Adam takes them."""


def _filled(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            yield value


@contextmanager
def _known(optimizer: Any, **results: Any) -> Iterator[None]:
    """Methods of Megatron's optimizer give what they gave before: its step would compute all of it once more."""
    for name, result in results.items():
        setattr(optimizer, name, lambda result=result: result)
    try:
        yield
    finally:
        for name in results:
            delattr(optimizer, name)
