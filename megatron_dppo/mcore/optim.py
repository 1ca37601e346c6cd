"""Megatron's DistributedDataParallel, optimizer, fp16 loss scale and learning-rate schedule."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
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
from megatron_dppo.mcore.mapping import preserve_fp32
from megatron_dppo.mcore.offload import (
    drop_gradient_copies,
    hybrid_settings,
    is_offloaded,
    offloaded_tensors,
    start_offloaded,
)
from megatron_dppo.mcore.optimizer_shards import correct_group_order, use_box_sharding
from megatron_dppo.parallel.platform import DTYPES


class LossScale(MegatronGradScaler):
    """Dynamic loss scale for fp16: halved after overflows, doubled after many updates without one.

    Megatron calls ``update`` for each part of a chained optimizer (dense and expert parameters), which may disagree.
    Here ``adjust`` is called once per update, with the overflow that all ranks agree on.
    """

    def __init__(self, settings: OptimizerConfig, device: torch.device) -> None:
        self._scale = torch.tensor([settings.initial_loss_scale], dtype=torch.float, device=device)
        self._minimum = settings.min_loss_scale
        self._window = settings.loss_scale_window
        self._hysteresis = settings.hysteresis
        self._good_updates = 0
        """Updates without an overflow since the last change or overflow."""
        self._overflows_left = settings.hysteresis

    @property
    def value(self) -> float:
        """Loss scale as a number."""
        return float(self._scale)

    def update(self, has_inf: bool) -> None:
        """Do nothing: Megatron calls this for each part of the optimizer, and ``adjust`` follows for all of them."""

    def adjust(self, *, overflow: bool) -> bool:
        """Adjust the scale after an update. Return False if it must be halved and is at its minimum already."""
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
    with preserve_fp32(chunks):
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


class AdamStep(NamedTuple):
    """Adam's constants of one update, for a caller that chooses them anew for each."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_grad: float
    """Maximum global gradient norm. 0 disables clipping."""


class UpdateResult(NamedTuple):
    """Result of one optimizer step, equal on all ranks."""

    applied: bool
    """False if the gradient norm was not finite."""
    grad_norm: float
    has_lower_scale: bool = False
    """True if an fp16 overflow was handled by the loss scale, so that training can continue."""


class Optimizer:
    """Megatron's optimizer with its learning-rate schedule, whose length is ``total_steps`` of the caller.

    The weights of the DDP-wrapped ``chunks`` must be loaded: fp32 main parameters are copied from them. The gradient
    hooks of ``config`` are set here. ``parts`` are the optimizers that train weights, by their index in Megatron's
    chain; ``loss_scale`` is that of fp16, None for other dtypes.
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
            _megatron_config(optimizer, parallel, config),
            self._chunks,
            # They serve Megatron's own checkpoint formats, which this package does not write.
            use_gloo_process_groups=False,
        )
        parts = self.megatron.chained_optimizers
        self._is_chained = len(parts) > 1
        # Dense weights and experts. A part that trains no weight is a stub, which cannot be saved or loaded.
        self.parts = {index: part for index, part in enumerate(parts) if not part.is_stub_optimizer}
        self._num_updates = 0
        self.loss_scale = LossScale(optimizer, next(chunks[0].parameters()).device) if config.fp16 else None
        # Megatron allocates the moments in the first update; saving or loading a checkpoint needs them earlier.
        for part in self.parts.values():
            if is_offloaded(part):
                start_offloaded(part)
            else:
                part.init_state_fn(part.optimizer, part.config)
            if isinstance(part, DistributedOptimizer):
                correct_group_order(part)
                use_box_sharding(part)
                part.state_dict = partial(self._group_state, part)
        if self.loss_scale is not None:
            for part in self.megatron.chained_optimizers:
                part.grad_scaler = self.loss_scale
        self._scheduler = OptimizerParamScheduler(
            self.megatron,
            init_lr=0.0,
            max_lr=optimizer.lr,
            min_lr=optimizer.min_lr,
            lr_warmup_steps=optimizer.lr_warmup_steps,
            # OptimizerParamScheduler asserts that the warm-up is shorter than the decay.
            lr_decay_steps=max(total_steps, optimizer.lr_warmup_steps + 1),
            lr_decay_style=optimizer.lr_decay_style,
            start_wd=optimizer.weight_decay,
            end_wd=optimizer.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,
        )
        self._set_hooks(config, overlaps=parallel.overlap_grad_reduce)

    def _set_hooks(self, config: TransformerConfig, *, overlaps: bool) -> None:
        """Set the hooks that Megatron's schedules read from the TransformerConfig."""
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.megatron.scale_loss
        if overlaps:
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
        for part in self.parts.values():
            if is_offloaded(part):
                drop_gradient_copies(part)

    def set_step(self, step: int) -> float:
        """Set the learning rate of a step, from 0, and return it. Step 0 has a non-zero rate already.

        The rate is a function of the step alone, so that a resumed run needs no scheduler state.
        """
        # OptimizerParamScheduler counts the increment before it computes the rate.
        self._scheduler.num_steps = step
        self._scheduler.step(increment=1)
        return float(next(iter(self.parts.values())).param_groups[0]["lr"])

    def set_adam(self, settings: AdamStep) -> None:
        """Set the constants of the next updates, in place of those of ``[optimizer]`` and its schedule."""
        for part in self.parts.values():
            part.config.clip_grad = settings.clip_grad
            for group in part.param_groups:
                group["lr"] = settings.lr * group.get("lr_mult", 1.0)
                group["weight_decay"] = settings.weight_decay * group.get("wd_mult", 1.0)
                group["betas"] = settings.betas
                group["eps"] = settings.eps

    def reduce_sums(self) -> None:
        """Reduce the gradients of all calls with ``reduces = False`` over the ranks, without a division."""
        finalize_model_grads(self._chunks, None)

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
        self._num_updates += bool(applied)
        return UpdateResult(bool(applied), float(norm))

    def finish_overlapped_gather(self) -> None:
        """Wait for the all-gather of parameters that ``overlap_param_gather`` defers to the next forward pass."""
        for chunk in self._chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def sharded_state_dict(self, model_state: dict[str, Any], *, is_loading: bool, metadata: dict[str, Any]) -> Any:
        """Return Megatron's sharded optimizer state for dist_checkpointing.

        Megatron's ``ChainedOptimizer.sharded_state_dict`` cannot save a part that trains no weight (the dense part
        when only experts have adapters). Affected: Megatron Core 0.16.1; 0.19.2 was not tried without this. Use
        Megatron's method when it can.
        """
        states = {
            index: part.sharded_state_dict(model_state, is_loading, metadata=metadata)
            for index, part in self.parts.items()
        }
        return states if self._is_chained else states[0]

    def _group_state(self, part: DistributedOptimizer) -> dict[str, Any]:
        """Return the state of a part that is no tensor, as ``DistributedOptimizer.state_dict`` does.

        Rank 0 writes it for all ranks. Megatron reads the number of updates from the state of a weight, and fails on
        a rank that holds no element of the part: a pipeline stage without experts, or a shard of few small adapters.
        Affected: Megatron Core 0.16.1; 0.19.2 was not tried without this. Delete when Megatron counts updates on every
        rank.
        """
        dropped = hybrid_settings(part) | {"params"}
        groups = [
            {key: value for key, value in group.items() if key not in dropped} | {"step": self._num_updates}
            for group in part.optimizer.state_dict()["param_groups"]
        ]
        state: dict[str, Any] = {"optimizer": {"param_groups": groups}}
        if part.grad_scaler is not None:
            state["grad_scaler"] = part.grad_scaler.state_dict()
        return state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        """Restore the state of a checkpoint. Learning rates, betas and weight decay stay those of this run.

        The checkpoint may come from another layout. Megatron has a separate part for experts only with expert
        parallelism, so the saved parts can be others than those here. Each weight's state is stored under the weight's
        name and loads into any part. Of the parameter groups only the number of updates is read.
        """
        # A chained optimizer has its parts by number; a single one is the state itself.
        saved = [state, *(value for key, value in state.items() if isinstance(key, int))]
        self._num_updates = max(_num_updates(each) for each in saved)
        # Equal in all parts.
        shared = {key: each[key] for each in saved for key in ("grad_scaler", _SHARDING) if key in each}
        for index, part in self.parts.items():
            entry = state.get(index, {}) if self._is_chained else state
            entry = shared | {key: value for key, value in entry.items() if not isinstance(key, int)}
            part.load_state_dict(self._with_groups(part, entry))

    def _with_groups(self, part: Any, entry: dict[str, Any]) -> dict[str, Any]:
        """Complete the loaded state of a part by its own parameter groups and the number of updates."""
        if isinstance(part, DistributedOptimizer):
            return {"param_state": {}, **entry, "optimizer": self._group_state(part)["optimizer"]}
        # In bf16 and fp16 the inner optimizer's state is nested.
        inner = entry.get("optimizer", entry)
        inner["param_groups"] = [
            {**group, "step": self._num_updates} for group in part.optimizer.state_dict()["param_groups"]
        ]
        inner.setdefault("state", {})
        # torch's AdamW counts the updates of each weight. Others count in the groups.
        if any("step" in state for state in part.optimizer.state.values()):
            inner["state"]["common_step"] = torch.tensor(float(self._num_updates))
        else:
            inner["state"].pop("common_step", None)
        return entry


def _num_updates(state: dict[str, Any]) -> int:
    """Return the number of updates in the saved state of a part, or 0 where it holds none."""
    inner = state.get("optimizer", state)
    steps = [group.get("step") for group in inner.get("param_groups", ())]
    steps.append(inner.get("state", {}).get("common_step"))
    return int(max((step for step in steps if step is not None), default=0))


_SHARDING = "param_state_sharding_type"
"""Key of Megatron's distributed optimizer for the format of ``param_state``."""


def optimizer_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the optimizer's tensors on this rank: main parameters and moments."""
    for part in optimizer.parts.values():
        # The parameters of an offloaded optimizer are the model's weights: only its state counts.
        if is_offloaded(part):
            yield from _nonempty_tensors(offloaded_tensors(part))
            continue
        for group in part.optimizer.param_groups:
            yield from _nonempty_tensors(group["params"])
        for state in part.optimizer.state.values():
            yield from _nonempty_tensors(state.values())


def _megatron_config(
    optimizer: OptimizerConfig, parallel: ParallelConfig, config: TransformerConfig
) -> MegatronOptimizerConfig:
    return MegatronOptimizerConfig(
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
    )


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
