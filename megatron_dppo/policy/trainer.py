"""The policy on this rank: update it, read its log-probabilities and weights, save and load it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.config.layout import Layout
from megatron_dppo.config.model import LoraConfig, ModelConfig, ParallelConfig
from megatron_dppo.config.optimizer import OptimizerConfig
from megatron_dppo.config.rollout import RolloutConfig
from megatron_dppo.config.train import LayerNoiseConfig, TrainConfig
from megatron_dppo.data.training_samples import RowShape
from megatron_dppo.head.teacher import TeacherTargets
from megatron_dppo.hf.folder import model_shape, routing_shape
from megatron_dppo.losses import Objective, with_cosines
from megatron_dppo.mcore.bridge import Bridge, WeightSource
from megatron_dppo.mcore.checkpoint.save_load import Save, load_checkpoint, read_state, save_checkpoint
from megatron_dppo.mcore.compat.extensions import prepare_extensions
from megatron_dppo.mcore.forward import forward_backward, forward_hidden_states, forward_logprobs
from megatron_dppo.mcore.fusions import row_multiple
from megatron_dppo.mcore.head import OutputHead
from megatron_dppo.mcore.host_memory import DeviceState, ReferenceWeights
from megatron_dppo.mcore.invariant import TILE, enable_batch_invariant_mode
from megatron_dppo.mcore.layer_noise import LayerNoise
from megatron_dppo.mcore.lora import Lora
from megatron_dppo.mcore.model import LoadBalancingLosses, build_model, transformer_config
from megatron_dppo.mcore.optim import Optimizer, wrap_for_training
from megatron_dppo.mcore.router_replay import ReplayDriver, ReplayMode, drop_routes
from megatron_dppo.mcore.row import MicroBatchRow, RowRecord
from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.policy.packed import Packed, Packer, attention_length
from megatron_dppo.report.metrics import reduce_metrics
from megatron_dppo.types import MicroBatch, StepResult, TrainingSample


class PolicyTrainer:
    """A Megatron model with its optimizer.

    Args:
        model: the policy; folder and initialization of the weights do not count.
        lora: the adapters.
        parallel: what Megatron overlaps, and whether its optimizer is distributed.
        train: which routes are replayed.
        rollout: temperature, and whether the engine samples with this model.
        seed: of adapters and noise.
        hf_config: the transformers config of the model.
        weights: the initial weights, full tensors by Hugging Face name.
        reference: the reference policy's; kept on the host and swapped in for ``logprobs(reference=True)``. With
            adapters None = the model without them.
        layout: the checked layout.
        groups: its process groups.
        platform: the device of this process.
        optimizer: learning rate and schedule of this phase.
        total_steps: length of the schedule, in the caller's steps.
        noise: on the layers' inputs in updates; None = there is none.

    Attributes:
        policy_version: optimizer updates applied so far.
        lora: the adapters, the only weights that are trained then; None = all are.
        dp_rank: this rank's index among ranks with different samples.
        optimizer: the optimizer; ``optimizer.set_step`` sets the learning rate.
        device_state: moves what it keeps on the device to the host and back, between updates.
        row_shape: what packed rows have to be padded to.
        attention_length: what attention costs, see ``policy.costs``.
        routing_shape: the sizes of ``routed_experts``; None for a dense model.
    """

    def __init__(
        self,
        *,
        model: ModelConfig,
        lora: LoraConfig,
        parallel: ParallelConfig,
        train: TrainConfig,
        rollout: RolloutConfig,
        seed: int,
        hf_config: Any,
        weights: WeightSource,
        reference: WeightSource | None = None,
        layout: Layout,
        groups: ParallelGroups,
        platform: Platform,
        optimizer: OptimizerConfig,
        total_steps: int,
        noise: LayerNoiseConfig | None = None,
    ) -> None:
        self.layout, self.groups, self.dp_rank = layout, groups, dist.get_rank(groups.dp)
        self.policy_version = 0
        replay = train.router_replay
        if rollout.batch_invariant:
            enable_batch_invariant_mode(platform.device)
        megatron_config = transformer_config(hf_config, model, layout, platform, router_replay=replay != "off")
        prepare_extensions(megatron_config)
        self.models = build_model(megatron_config, hf_config, dist.get_rank(groups.pp), platform.device)
        shape, tied = model_shape(hf_config), bool(hf_config.tie_word_embeddings)
        self.bridge = Bridge(self.models, shape, tied=tied, groups=groups)
        self.lora = Lora(self.models, shape, groups, lora, seed) if lora.rank else None
        self._as_reference = None if self.lora is None else self.lora.without
        if reference is not None:
            self.bridge.load(reference)
            self._as_reference = ReferenceWeights(self.models).swapped_in
        self.bridge.load(weights)
        self._chunks = wrap_for_training(
            self.models, megatron_config, parallel, grad_reduce_in_fp32=optimizer.grad_reduce_in_fp32
        )
        self.optimizer = Optimizer(self._chunks, megatron_config, optimizer, parallel, total_steps)
        self._noise = None
        if noise is not None and noise.std:
            adam = optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps
            self._noise = LayerNoise(self.models, megatron_config, noise, groups, seed, adam)
        self.device_state = DeviceState(self.models, self.optimizer)
        self._head = OutputHead(
            self.models[-1], groups.tp, hf_config.vocab_size, rollout.temperature, fused=model.fused_head
        )
        self.attention_length = attention_length(hf_config)
        self._cp_group = groups.cp if layout.cp > 1 else None
        tile = TILE if rollout.batch_invariant else row_multiple(model.transformer)
        self.row_shape = RowShape(row_multiple=layout.row_multiple * tile, sequence_multiple=layout.sequence_multiple)
        # This dispatcher gathers the rows of all expert-parallel ranks, and takes them to be equally long.
        equal_rows = layout.ep > 1 and megatron_config.moe_token_dispatcher_type == "allgather"
        self._packer = Packer(self.row_shape, layout.micro_batch_multiple, groups.dp, equal_rows=equal_rows)
        self._balance_losses = LoadBalancingLosses(megatron_config)
        self.routing_shape = routing_shape(hf_config, weights=train.router_replay_weights)
        self._replay_mode: ReplayMode = "compare" if replay == "compare" else "replay"
        self._replay = None
        if replay != "off" and self.routing_shape is not None:
            tp_group = groups.tp if layout.sequence_parallel else None
            self._replay = ReplayDriver(self.models, megatron_config, self.routing_shape, tp_group, self._cp_group)

    def update(self, batches: Sequence[MicroBatch], objective: Objective) -> StepResult:
        """One optimizer update from this rank's micro-batches (equally many on every rank)."""
        metrics = self.accumulate(batches, objective)
        return self.apply(metrics)

    def accumulate(
        self,
        batches: Sequence[MicroBatch],
        objective: Objective,
        teacher_targets: Sequence[TeacherTargets] = (),
        seen: list[RowRecord] | None = None,
    ) -> dict[str, float]:
        """Gradients of the global batch by its token count; returns metrics. See ``forward_backward``."""
        for chunk in self._chunks:
            chunk.train()
        self.optimizer.zero_grad()
        noise = None if self._noise is None else self._noise.for_version(self.policy_version)
        with self._routing(batches, self._replay_mode) as plain:
            local = forward_backward(
                self._chunks, plain, self._head, objective, self._cp_group, teacher_targets, seen, noise
            )
        first = dist.get_rank(self.groups.tp) == 0
        metrics = with_cosines(reduce_metrics(local, self.groups.world, contributes=first))
        first = first and dist.get_rank(self.groups.cp) == 0
        return metrics | self._balance_losses(len(batches)) | self._routing_metrics(batches, is_first=first)

    def _routing(
        self, batches: Sequence[MicroBatch], mode: ReplayMode | None
    ) -> AbstractContextManager[Sequence[MicroBatch]]:
        """Router replay around one run of the schedule, if these micro-batches have routes or are to get them."""
        if self._replay is None or mode is None or (mode != "record" and batches[0].routed_experts is None):
            return nullcontext(drop_routes(batches))
        return self._replay.running(batches, mode)

    def _routing_metrics(self, batches: Sequence[MicroBatch], *, is_first: bool) -> dict[str, float]:
        if self._replay is None or batches[0].routed_experts is None:
            return {}
        # Sequence parallelism is on wherever experts meet tensor parallelism, so every rank has tokens of its own.
        return reduce_metrics([self._replay.metrics(is_first=is_first)], self.groups.world)

    def apply(self, metrics: dict[str, float]) -> StepResult:
        """Step with the accumulated gradients; skipped when their norm is not finite."""
        scale = self.optimizer.loss_scale
        factor = 1.0 if scale is None else scale.value
        update = self.optimizer.step()
        if self._noise is not None:
            metrics = {**metrics, **self._noise.settle(factor, applied=update.applied)}
        self.policy_version += int(update.applied)
        return StepResult(
            policy_version=self.policy_version,
            grad_norm=update.grad_norm,
            learning_rate=float(self.optimizer.megatron.param_groups[0]["lr"]),
            skipped=not update.applied,
            has_lower_scale=update.has_lower_scale,
            metrics=metrics if scale is None else {**metrics, "loss_scale": scale.value},
        )

    def logprobs(self, batches: Sequence[MicroBatch], *, reference: bool = False) -> list[Tensor]:
        """Log-probabilities ``[T]`` of the labels of each micro-batch; empty but on the last pipeline stage.

        Args:
            batches: this rank's.
            reference: of the reference policy.

        Raises:
            RuntimeError: ``reference`` without reference weights.
        """
        if reference and self._as_reference is None:
            raise RuntimeError("this trainer has no reference policy: pass reference= when it is built")
        self.optimizer.finish_overlapped_gather()
        mode: ReplayMode | None = "replay" if self._replay_mode == "replay" and not reference else None
        with (
            self._as_reference() if reference and self._as_reference else nullcontext(),
            self._routing(batches, mode) as plain,
        ):
            return forward_logprobs(self._chunks, plain, self._head, self._cp_group)

    def record_routing(self, batches: Sequence[MicroBatch]) -> tuple[list[Tensor], list[Tensor]]:
        """``logprobs`` with the live routers, and their choices: the routes ``[T, L, k]`` of each micro-batch.

        Routes are known only for the layers of this pipeline stage, whose routers they are meant for.
        """
        assert self._replay is not None
        self.optimizer.finish_overlapped_gather()
        with self._routing(batches, "record") as plain:
            found = forward_logprobs(self._chunks, plain, self._head, self._cp_group)
        return found, self._replay.recorded(batches)

    def token_logprobs(
        self,
        batches: Sequence[MicroBatch],
        mode: Literal["record", "replay"] | None = None,
        read: Callable[[OutputHead, Tensor, MicroBatchRow], Any] = OutputHead.token_logprobs,
    ) -> tuple[list[Any], list[Tensor]]:
        """What an engine's answers are compared with, and the routes ``[T, L, k]``, both for each micro-batch.

        Args:
            batches: this rank's.
            mode: ``record``: the live routers' choices are returned too, those of this stage's layers; ``replay``: the
                given routes are used; None = neither.
            read: what is made of the hidden states of each row.

        Returns:
            Readings only on the last pipeline stage, routes only with ``record``.
        """
        assert mode is None or self._replay is not None
        self.optimizer.finish_overlapped_gather()
        with self._routing(batches, mode) as plain:
            found = forward_hidden_states(self._chunks, plain, lambda row, x: read(self._head, x, row), self._cp_group)
        return found, self._replay.recorded(batches) if self._replay is not None and mode == "record" else []

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Stream the full weights by Hugging Face name, adapters merged (a collective; see ``Bridge.export``).

        Not to be called between ``accumulate`` and ``apply``: Megatron would then skip the next parameter gather.
        """
        self.optimizer.finish_overlapped_gather()
        return self.bridge.export(Tensor.detach if self.lora is None else self.lora.merged)

    def export_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Stream the adapters by PEFT's names; the same rules."""
        assert self.lora is not None
        self.optimizer.finish_overlapped_gather()
        return self.lora.export()

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return dist.get_rank(self.groups.pp) == self.layout.pp - 1

    @property
    def replayed_layers(self) -> tuple[int, ...] | None:
        """Whose routes this rank needs, from 0; None = all, or no replay. Samples may have those of all layers."""
        return None if self._replay is None or self.layout.pp == 1 else self._replay.layers

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return next(self.models[0].parameters()).device

    def pack(self, samples: Sequence[TrainingSample], budget: int, bins: list[list[int]] | None = None) -> Packed:
        """This rank's samples as packed micro-batches; a collective. See ``Packer.pack``."""
        return self._packer.pack(samples, budget, bins)

    def save(
        self,
        folder: Path,
        step: int,
        state: dict[str, Any],
        keep: int,
        best: int | None = None,
        *,
        also: Callable[[Path], None] | None = None,
        background: dist.ProcessGroup | None = None,
    ) -> Save:
        """Write a checkpoint of this step; ``state`` is the caller's own, as JSON. See ``save_checkpoint``."""
        self.optimizer.finish_overlapped_gather()
        state = {**state, "policy_version": self.policy_version}
        if self._noise is not None:
            state["layer_noise"] = self._noise.state()
        more: dict[str, Any] = {"groups": self.groups, "also": also, "background": background}
        return save_checkpoint(folder, step, self.models, self.optimizer, state, keep, best, **more)

    def load(self, checkpoint: Path, *, same_layout: bool = True) -> dict[str, Any]:
        """Restore a checkpoint, also one of another layout, and return the caller's state."""
        state = read_state(checkpoint)
        load_checkpoint(checkpoint, self.models, self.optimizer, groups=self.groups, same_layout=same_layout)
        self.policy_version = state["policy_version"]
        if self._noise is not None:
            self._noise.load(state.get("layer_noise"))
        return state
