"""The policy on this rank: updates, log-probabilities, weights and checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.config.model import ParallelConfig
from megatron_dppo.config.optimizer import OptimizerConfig
from megatron_dppo.config.train import LayerNoiseConfig, TrainConfig
from megatron_dppo.data.training_samples import RowShape
from megatron_dppo.head.teacher import TeacherTargets
from megatron_dppo.hf.folder import Weights, routing_shape
from megatron_dppo.losses import Objective, with_cosines
from megatron_dppo.mcore.checkpoint.folder import read_state
from megatron_dppo.mcore.checkpoint.save_load import CheckpointSave, check_can_save, load_checkpoint, save_checkpoint
from megatron_dppo.mcore.forward import forward_backward, forward_hidden_states, forward_logprobs
from megatron_dppo.mcore.head import OutputHead, TokenLogprobs
from megatron_dppo.mcore.host_memory import DeviceState
from megatron_dppo.mcore.layer_noise import LayerNoise
from megatron_dppo.mcore.model import LoadBalancingLosses
from megatron_dppo.mcore.model_parts import ModelParts
from megatron_dppo.mcore.optim import AdamStep, Optimizer, wrap_for_training
from megatron_dppo.mcore.router_replay import ReplayDriver, ReplayMode, drop_routes, with_worst_layer
from megatron_dppo.mcore.row import MicroBatchRow, RowRecord
from megatron_dppo.policy.packed import Packer, attention_length
from megatron_dppo.report.metrics import reduce_metrics
from megatron_dppo.types import MicroBatch, StepResult
from megatron_dppo.types.stored_record import StoredRecord

ReadingT = TypeVar("ReadingT")


class PolicyTrainer:
    """A Megatron model with its optimizer: the policy shard of this rank.

    Megatron's DDP wraps the model here: the optimizer copies its initial weights into its fp32 main parameters.
    ``total_steps`` is the length of the learning-rate schedule, in steps of the caller. ``noise`` is added to the
    layers' inputs during updates.

    Attributes:
        policy_version: Number of optimizer updates applied so far.
        models: Unwrapped model chunks of this rank, one per virtual pipeline stage.
        bridge: Conversion between this rank's shards and Hugging Face weights.
        lora: Adapters, which are then the only trained weights. None trains all weights.
        dp_rank: Data-parallel index of this rank.
        optimizer: Megatron's optimizer. ``optimizer.set_step`` sets the learning rate.
        device_state: Moves weights, optimizer state and gradient buffers off the device between updates.
        row_shape: Multiples that packed rows and sequences are padded to.
        attention_length: Sequence length at which attention costs as much as the weight matrices (``policy.packed``).
        routing_shape: Sizes of ``routed_experts``. None for a dense model.
    """

    def __init__(
        self,
        parts: ModelParts,
        parallel: ParallelConfig,
        train: TrainConfig,
        optimizer: OptimizerConfig,
        *,
        total_steps: int,
        noise: LayerNoiseConfig | None = None,
    ) -> None:
        hf_config, layout, groups, _ = parts.placement
        megatron_config = parts.megatron_config
        self.layout = layout
        self.groups = groups
        self.dp_rank = dist.get_rank(groups.dp)
        self.policy_version = 0
        self.models = parts.models
        self.bridge = parts.bridge
        self.lora = parts.lora
        self._reference_context = parts.reference
        self._head = parts.head
        self._chunks = wrap_for_training(
            self.models, megatron_config, parallel, grad_reduce_in_fp32=optimizer.grad_reduce_in_fp32
        )
        self.optimizer = Optimizer(self._chunks, megatron_config, optimizer, parallel, total_steps)
        self.noise = None
        if noise is not None and noise.std:
            adam = (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps)
            self.noise = LayerNoise(self.models, megatron_config, noise, groups, parts.seed, adam)
        self.device_state = DeviceState(self.models, self.optimizer)

        # Packing: what rows are padded to, and how many micro-batches the schedule needs.
        self.attention_length = attention_length(hf_config)
        self._cp_group = groups.cp if layout.cp > 1 else None
        row_multiple = layout.row_multiple * parts.row_tile
        self.row_shape = RowShape(row_multiple=row_multiple, sequence_multiple=layout.sequence_multiple)
        # Megatron's allgather dispatcher gathers the rows of all expert-parallel ranks and requires equal lengths.
        equal_rows = layout.ep > 1 and megatron_config.moe_token_dispatcher_type == "allgather"
        self.pack = Packer(self.row_shape, layout.micro_batch_multiple, groups.dp, equal_rows=equal_rows).pack
        self._balance_losses = LoadBalancingLosses(megatron_config, groups.dp)

        # Router replay.
        self.routing_shape = routing_shape(hf_config, weights=train.router_replay_weights)
        self._replay_mode: ReplayMode = "compare" if train.router_replay == "compare" else "replay"
        self._replay = None
        if train.router_replay != "off" and self.routing_shape is not None:
            tp_group = groups.tp if layout.sequence_parallel else None
            self._replay = ReplayDriver(self.models, megatron_config, self.routing_shape, tp_group, self._cp_group)

    def update(self, batches: Sequence[MicroBatch], objective: Objective) -> StepResult:
        """Run one optimizer update from this rank's micro-batches, equally many on every rank."""
        return self.apply(self.accumulate(batches, objective))

    def accumulate(
        self,
        batches: Sequence[MicroBatch],
        objective: Objective,
        teacher_targets: Sequence[TeacherTargets] = (),
        records: list[RowRecord] | None = None,
    ) -> dict[str, float]:
        """Accumulate the gradients of the global batch, divided by its token count, and return the metrics.

        ``teacher_targets``, one for each micro-batch, add the divergence from the teacher to the loss. ``records``
        receives the tokens of each micro-batch in host memory, on the last pipeline stage.
        """
        for chunk in self._chunks:
            chunk.train()
        self.optimizer.zero_grad()
        noise = None if self.noise is None else self.noise.for_version(self.policy_version)
        # The micro-batches of the schedule have no routes: those stay on the host until their chunk runs.
        with self._routing(batches, self._replay_mode, by_token=records is not None) as plain:
            local = forward_backward(
                self._chunks, plain, self._head, objective, self._cp_group, teacher_targets, records, noise
            )
        if records is not None:
            # After the schedule: a copy within it would make every micro-batch wait for the device.
            records[:] = [record.cpu() for record in records]
        # Tensor-parallel ranks compute the same loss, so one reports it. Context-parallel ranks have other tokens.
        is_first_tp = dist.get_rank(self.groups.tp) == 0
        metrics = with_cosines(reduce_metrics(local, self.groups.world, contributes=is_first_tp))
        is_first = is_first_tp and dist.get_rank(self.groups.cp) == 0
        return metrics | self._balance_losses.collect(batches) | self._routing_metrics(batches, is_first=is_first)

    def accumulate_sum(self, batches: Sequence[MicroBatch], objective: Objective) -> list[Tensor]:
        """Add the gradients of the loss's sum to those of earlier calls, undivided, for ``apply_sum``.

        Returns the log-probabilities ``[T]`` of the labels of each micro-batch, in host memory; an empty list on all
        but the last pipeline stage.
        """
        for chunk in self._chunks:
            chunk.train()
        records: list[RowRecord] = []
        with self._routing(batches, self._replay_mode) as plain:
            forward_backward(self._chunks, plain, self._head, objective, self._cp_group, records=records, reduces=False)
        return [record.logprobs.cpu() for record in records]

    def apply_sum(self, settings: AdamStep) -> StepResult:
        """Step the optimizer with the gradients of ``accumulate_sum``, which start at 0 again."""
        self.optimizer.reduce_sums()
        self.optimizer.set_adam(settings)
        result = self.apply({})
        self.optimizer.zero_grad()
        return result

    def route_differences(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return ``ReplayDriver.live_differences`` after ``accumulate`` with ``records``; empty without routes."""
        if self._replay is None or batches[0].routed_experts is None:
            return []
        return self._replay.live_differences(batches)

    def _routing(
        self, batches: Sequence[MicroBatch], mode: ReplayMode | None, *, by_token: bool = False
    ) -> AbstractContextManager[Sequence[MicroBatch]]:
        """Return router replay around one run of the schedule; it does nothing for micro-batches without routes."""
        if self._replay is None or mode is None or (mode != "record" and batches[0].routed_experts is None):
            return nullcontext(drop_routes(batches))
        return self._replay.run(batches, mode, by_token=by_token)

    def _routing_metrics(self, batches: Sequence[MicroBatch], *, is_first: bool) -> dict[str, float]:
        if self._replay is None or batches[0].routed_experts is None:
            return {}
        # Megatron requires sequence parallelism for MoE with tensor parallelism: every rank routes different tokens.
        return with_worst_layer(reduce_metrics([self._replay.metrics(is_first=is_first)], self.groups.world))

    def apply(self, metrics: dict[str, float]) -> StepResult:
        """Step the optimizer with the accumulated gradients; skipped when the gradient norm is not finite."""
        # With bf16 and fp32 there is no loss scale.
        scale = self.optimizer.loss_scale
        # Read before the step, which may change it: the noise's gradient was multiplied by this value.
        loss_scale = 1.0 if scale is None else scale.value
        update = self.optimizer.step()
        if self.noise is not None:
            metrics = {**metrics, **self.noise.step(loss_scale, applied=update.applied)}
        self.policy_version += int(update.applied)
        if scale is not None:
            metrics = {**metrics, "loss_scale": scale.value}
        return self._result(
            metrics, update.grad_norm, skipped=not update.applied, has_lower_scale=update.has_lower_scale
        )

    def skip(self, metrics: dict[str, float]) -> StepResult:
        """Leave the weights and the optimizer's state as they are: no token of the mini-batch has a loss."""
        return self._result(metrics, 0.0, skipped=False)

    def _result(self, metrics: dict[str, float], grad_norm: float, **flags: bool) -> StepResult:
        rate = float(self.optimizer.megatron.param_groups[0]["lr"])
        return StepResult(
            policy_version=self.policy_version, grad_norm=grad_norm, learning_rate=rate, metrics=metrics, **flags
        )

    def logprobs(self, batches: Sequence[MicroBatch], *, reference: bool = False) -> list[Tensor]:
        """Return the log-probabilities ``[T]`` of the labels of each micro-batch, on the last pipeline stage."""
        if reference and self._reference_context is None:
            raise RuntimeError("This trainer has no reference policy. Fix: pass reference= to build_model_parts.")
        # A forward pass outside of training must not start before the deferred all-gather of the new weights has
        # ended.
        self.optimizer.finish_overlapped_gather()
        # The routes are the policy's. The reference chooses its experts itself.
        mode: ReplayMode | None = "replay" if self._replay_mode == "replay" and not reference else None
        with (
            self._reference_context() if reference and self._reference_context else nullcontext(),
            self._routing(batches, mode) as plain,
        ):
            return forward_logprobs(self._chunks, plain, self._head, self._cp_group)

    def record_routing(self, batches: Sequence[MicroBatch]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the log-probabilities under the live routers, and the routes ``[T, L, k]`` of this stage's layers."""
        return self.read_rows(batches, lambda head, hidden, row: head.statistics(hidden, row).logprobs, "record")

    def token_logprobs(
        self,
        batches: Sequence[MicroBatch],
        mode: Literal["record", "replay"] | None = None,
    ) -> tuple[list[TokenLogprobs], list[Tensor]]:
        """Return the log-probabilities that an engine's responses are compared with; see ``read_rows``."""
        return self.read_rows(batches, OutputHead.token_logprobs, mode)

    def read_rows(
        self,
        batches: Sequence[MicroBatch],
        read: Callable[[OutputHead, Tensor, MicroBatchRow], ReadingT],
        mode: Literal["record", "replay"] | None = None,
    ) -> tuple[list[ReadingT], list[Tensor]]:
        """Return what a function computes of each row of the current weights, and the routes ``[T, L, k]``.

        There is one result of ``read`` for each micro-batch, on the last pipeline stage only. The mode ``record`` also
        returns the live routers' choices in this stage's layers, ``replay`` uses the routes of the micro-batches, None
        does neither.
        """
        assert mode is None or self._replay is not None
        self.optimizer.finish_overlapped_gather()
        with self._routing(batches, mode) as plain:
            results = forward_hidden_states(
                self._chunks, plain, lambda row, hidden: read(self._head, hidden, row), self._cp_group
            )
        if self._replay is None or mode != "record":
            return results, []
        return results, self._replay.recorded_routes(batches)

    def export_weights(self) -> Weights:
        """Stream the full weights by Hugging Face name, adapters merged; a collective, see ``Bridge.export``.

        Do not call it between ``accumulate`` and ``apply``. With ``overlap_param_gather`` it finishes the gather, and
        Megatron then skips the one that the next forward pass needs.
        """
        self.optimizer.finish_overlapped_gather()
        return self.bridge.export(Tensor.detach if self.lora is None else self.lora.merge)

    def export_adapters(self) -> Weights:
        """Stream the adapters by PEFT name; a collective with the rules of ``export_weights``."""
        assert self.lora is not None
        self.optimizer.finish_overlapped_gather()
        return self.lora.export()

    @property
    def is_last_stage(self) -> bool:
        """True if this rank has the last pipeline stage, which computes the loss."""
        return dist.get_rank(self.groups.pp) == self.layout.pp - 1

    @property
    def replayed_layers(self) -> tuple[int, ...] | None:
        """Layers whose routes this rank needs, from 0. None means all layers, or no replay."""
        return None if self._replay is None or self.layout.pp == 1 else self._replay.layers

    @property
    def device(self) -> torch.device:
        """Device of this rank's model."""
        return next(self.models[0].parameters()).device

    def save(
        self,
        folder: Path,
        step: int,
        state: Mapping[str, object],
        keep: int,
        best: int | None = None,
        *,
        write_extra: Callable[[Path], None] | None = None,
        background_group: dist.ProcessGroup | None = None,
    ) -> CheckpointSave:
        """Write a checkpoint of this step; a collective, see ``save_checkpoint``."""
        self.optimizer.finish_overlapped_gather()
        state = {**state, "policy_version": self.policy_version}
        if self.noise is not None:
            state["layer_noise"] = self.noise.state()
        return save_checkpoint(
            folder,
            step,
            self.models,
            self.optimizer,
            state,
            keep,
            best,
            groups=self.groups,
            write_extra=write_extra,
            background_group=background_group,
        )

    def check_can_save(self) -> None:
        """Check that ``save`` will work, without writing. See ``check_can_save`` of ``mcore.checkpoint.save_load``."""
        check_can_save(self.models, self.optimizer)

    def load(self, checkpoint: Path, *, same_layout: bool = True) -> StoredRecord:
        """Restore a checkpoint and return the state that the caller saved.

        Random states exist once per rank: another layout than that of the checkpoint cannot restore them.
        """
        state = read_state(checkpoint)
        load_checkpoint(checkpoint, self.models, self.optimizer, groups=self.groups, same_layout=same_layout)
        self.policy_version = state["policy_version"]
        if self.noise is not None:
            self.noise.load(state.get("layer_noise"))
        return state
