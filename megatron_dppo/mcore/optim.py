"""Megatron's DistributedDataParallel, optimizer, fp16 loss scale and learning-rate schedule."""

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
    """Dynamic loss scale for fp16: halved after overflows, doubled after many updates without one.

    Megatron calls ``update`` for each part of a chained optimizer (dense and expert parameters), which may disagree.
    Here ``adjust`` is called once per update, with the overflow that all ranks agree on.

    Args:
        settings: Initial and minimum scale, window and hysteresis.
        device: Device of the gradients.
    """

    def __init__(self, settings: OptimizerConfig, device: torch.device) -> None:
        self._scale = torch.tensor([settings.initial_loss_scale], dtype=torch.float, device=device)
        self._minimum = settings.min_loss_scale
        self._window = settings.loss_scale_window
        self._hysteresis = settings.hysteresis
        self._good_updates = 0
        """Updates without an overflow since the last change or overflow."""
        self._overflows_left = settings.hysteresis
        """Overflows until the scale is halved."""

    @property
    def value(self) -> float:
        """Loss scale as a number."""
        return float(self._scale)

    @property
    def scale(self) -> Tensor:
        """Loss scale as a tensor [1]."""
        return self._scale

    @property
    def inv_scale(self) -> Tensor:
        """Inverse of the loss scale as a tensor [1]."""
        return self._scale.double().reciprocal().float()

    def update(self, found_inf: bool) -> None:
        """Do nothing: Megatron calls this for each part of the optimizer, and ``adjust`` follows for all of them."""

    def adjust(self, *, overflow: bool) -> bool:
        """Adjust the scale after an update.

        Args:
            overflow: True if the gradient norm was not finite; equal on all ranks.

        Returns:
            False if the scale must be halved and is at its minimum already.
        """
        if not overflow:
            self._good_updates += 1
            if self._good_updates == self._window:
                self._good_updates = 0
                self._overflows_left = self._hysteresis
                self._scale *= 2
            return True
        self._good_updates = 0
        self._overflows_left -= 1
        if self._overflows_left > 0:
            return True
        lowered = max(self.value / 2, self._minimum)
        has_lower = lowered < self.value
        self._scale.fill_(lowered)
        return has_lower

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"scale": self.value, "without": self._good_updates, "left": self._overflows_left}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self._scale.fill_(state_dict["scale"])
        self._good_updates = state_dict["without"]
        self._overflows_left = state_dict["left"]


def wrap_float16(config: TransformerConfig, chunks: Sequence[GPTModel]) -> list[Any]:
    """Wrap each chunk in Megatron's Float16Module for bf16 and fp16, which converts its weights."""
    with preserve_router_biases(chunks):
        return [Float16Module(config, chunk) if config.bf16 or config.fp16 else chunk for chunk in chunks]


def wrap_for_training(
    chunks: Sequence[GPTModel], config: TransformerConfig, parallel: ParallelConfig, *, grad_reduce_in_fp32: bool
) -> list[DistributedDataParallel]:
    """Wrap each chunk in Float16Module, for bf16 and fp16, and in Megatron's DistributedDataParallel."""
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        grad_reduce_in_fp32=grad_reduce_in_fp32,
    )
    modules = wrap_float16(config, chunks)
    return [
        # As in Megatron's training loop: reductions of the later chunks overlap with compute without buckets too.
        DistributedDataParallel(config, ddp_config, module, disable_bucketing=(i > 0))
        for i, module in enumerate(modules)
    ]


class UpdateResult(NamedTuple):
    """Result of one optimizer step, equal on all ranks."""

    applied: bool
    """False if the gradient norm was not finite."""
    grad_norm: float
    """Global gradient norm before clipping."""
    has_lower_scale: bool = False
    """True if an fp16 overflow was handled by the loss scale, so that training can continue."""


class Optimizer:
    """Megatron's optimizer with its learning-rate schedule.

    Args:
        chunks: DDP-wrapped model chunks. Their weights must be loaded: fp32 main parameters are copied from them.
        config: TransformerConfig of the model. Its gradient hooks are set here.
        optimizer: Learning rate, schedule and Adam's constants.
        parallel: Distributed optimizer and communication overlap.
        total_steps: Length of the schedule, in steps of the caller.

    Attributes:
        megatron: Megatron's optimizer.
        loss_scale: Loss scale of fp16. None for other dtypes.
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
                **_memory_fields(optimizer, config),
            ),
            self._chunks,
        )
        self.loss_scale = LossScale(optimizer, next(chunks[0].parameters()).device) if config.fp16 else None
        # Megatron allocates the moments in the first update; saving or loading a checkpoint needs them earlier.
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
        # Hooks that Megatron's schedules read from the TransformerConfig.
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.megatron.scale_loss
        if parallel.overlap_grad_reduce:
            # Gradients are reduced in the last micro-batch only. The interleaved schedule takes one hook per chunk.
            no_sync_hooks = [chunk.no_sync for chunk in self._chunks]
            config.no_sync_func = no_sync_hooks if len(no_sync_hooks) > 1 else no_sync_hooks[0]
            if len(no_sync_hooks) > 1:
                config.grad_sync_func = [chunk.start_grad_sync for chunk in self._chunks]

    def zero_grad(self) -> None:
        """Set the gradient buffers to 0."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Free gradients of the last update outside the gradient buffers, such as fp32 copies of bf16 gradients."""
        self.megatron.zero_grad()
        for part in self.megatron.chained_optimizers:
            if is_offloaded(part):
                drop_gradient_copies(part)

    def set_step(self, step: int) -> float:
        """Set the learning rate of a step, from 0, and return it. Step 0 has a non-zero rate already.

        The rate is a function of the step alone, so that a resumed run needs no scheduler state.
        """
        # OptimizerParamScheduler counts the increment before it computes the rate.
        self._scheduler.num_steps = step
        self._scheduler.step(increment=1)
        return float(self.megatron.param_groups[0]["lr"])

    def step(self) -> UpdateResult:
        """Update the weights, or skip the update if the global gradient norm is not finite."""
        # Before Megatron's own step: with fp32 and bf16 it would apply an update of non-finite gradients.
        has_inf = self.megatron.prepare_grads()
        norm = self.megatron.get_grad_norm()
        overflow = not math.isfinite(norm)
        has_lower = self.loss_scale is not None and self.loss_scale.adjust(overflow=overflow)
        if overflow:
            return UpdateResult(False, float(norm), has_lower)
        with _reuse_results(self.megatron, prepare_grads=has_inf, get_grad_norm=norm):
            applied, _, _ = self.megatron.step()
        return UpdateResult(bool(applied), float(norm))

    def finish_overlapped_gather(self) -> None:
        """Wait for the all-gather of parameters that ``overlap_param_gather`` defers to the next forward pass."""
        for chunk in self._chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def sharded_state_dict(self, model_state: dict[str, Any], *, is_loading: bool, metadata: dict[str, Any]) -> Any:
        """Return Megatron's sharded optimizer state for dist_checkpointing."""
        return self.megatron.sharded_state_dict(model_state, is_loading=is_loading, metadata=metadata)

    def load_state_dict(self, state: Any) -> None:
        """Restore the state of a checkpoint. Learning rates, betas and weight decay stay those of this run."""
        parts = [part.optimizer for part in self.megatron.chained_optimizers if not part.is_stub_optimizer]
        # Megatron's load replaces the parameter groups with those of the checkpoint, hyperparameters included.
        hyperparameters = [
            [{key: value for key, value in group.items() if key not in _GROUP_STATE} for group in part.param_groups]
            for part in parts
        ]
        self.megatron.load_state_dict(state)
        for part, groups in zip(parts, hyperparameters, strict=True):
            for group, values in zip(part.param_groups, groups, strict=True):
                group.update(values)


_GROUP_STATE = ("params", "step")
"""Keys of a parameter group that are no hyperparameters. Megatron keeps the number of updates in ``step``."""


def optimizer_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the optimizer's tensors on this rank: main parameters and moments."""
    for part in optimizer.megatron.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        # The parameters of an offloaded optimizer are the model's weights: only its state counts.
        if is_offloaded(part):
            yield from _nonempty_tensors(offloaded_tensors(part))
            continue
        for group in part.optimizer.param_groups:
            yield from _nonempty_tensors(group["params"])
        for state in part.optimizer.state.values():
            yield from _nonempty_tensors(state.values())


def _memory_fields(optimizer: OptimizerConfig, config: TransformerConfig) -> dict[str, Any]:
    """Return Megatron's fields for dtype and place of the optimizer state."""
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
"""Dtypes as Transformer Engine's FusedAdam expects them; it marks fp8 moments by uint8."""


def _nonempty_tensors(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            yield value


@contextmanager
def _reuse_results(optimizer: Any, **results: Any) -> Iterator[None]:
    """Make methods of Megatron's optimizer return known results, which its step would compute a second time."""
    for name, result in results.items():
        setattr(optimizer, name, lambda result=result: result)
    try:
        yield
    finally:
        for name in results:
            delattr(optimizer, name)
