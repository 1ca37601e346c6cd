"""The policy on this rank: update it, read its log-probabilities and weights, save and load it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.config import Config, OptimizerConfig
from megatron_dppo.hf import model_shape
from megatron_dppo.layout import Layout
from megatron_dppo.mcore.bridge import Bridge, WeightSource
from megatron_dppo.mcore.checkpoint import load_checkpoint, read_state, save_checkpoint
from megatron_dppo.mcore.forward import LossFunction, TokenStatistics, forward_backward, forward_logprobs
from megatron_dppo.mcore.model import build_model, transformer_config
from megatron_dppo.mcore.optim import Optimizer, wrap_for_training
from megatron_dppo.metrics import reduce_metrics
from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.platform import Platform
from megatron_dppo.types import MicroBatch, StepResult


class DictWeights:
    """A stream of weights held in memory, as a source for the bridge."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._tensors = dict(weights)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def names(self) -> set[str]:
        """All names."""
        return set(self._tensors)


class PolicyTrainer:
    """A Megatron model with its optimizer.

    Args:
        config: the whole configuration.
        hf_config: the transformers config of the model.
        weights: the initial weights, full tensors by Hugging Face name.
        layout: the checked layout.
        groups: its process groups.
        platform: the device of this process.
        optimizer: learning rate and schedule of this phase.
        total_steps: length of the schedule, in the caller's steps.

    Attributes:
        policy_version: optimizer updates applied so far.
        dp_rank: this rank's index among ranks with different samples.
        optimizer: the optimizer; ``optimizer.set_step`` sets the learning rate.
    """

    def __init__(
        self,
        *,
        config: Config,
        hf_config: Any,
        weights: WeightSource,
        layout: Layout,
        groups: ParallelGroups,
        platform: Platform,
        optimizer: OptimizerConfig,
        total_steps: int,
    ) -> None:
        self.layout, self.groups, self.dp_rank = layout, groups, dist.get_rank(groups.dp)
        self.policy_version = 0
        megatron_config = transformer_config(hf_config, config.model, layout, platform)
        self.models = build_model(megatron_config, hf_config, dist.get_rank(groups.pp), platform.device)
        self.bridge = Bridge(self.models, model_shape(hf_config), tied=hf_config.tie_word_embeddings, groups=groups)
        self.bridge.load(weights)
        self._chunks = wrap_for_training(self.models, megatron_config, config.parallel)
        self.optimizer = Optimizer(self._chunks, megatron_config, optimizer, config.parallel, total_steps)
        self._statistics = TokenStatistics(groups.tp, hf_config.vocab_size, config.rollout.temperature)

    def update(self, batches: Sequence[MicroBatch], loss: LossFunction) -> StepResult:
        """One optimizer update from this rank's micro-batches (equally many on every rank)."""
        metrics = self.accumulate(batches, loss)
        return self.apply(metrics)

    def accumulate(self, batches: Sequence[MicroBatch], loss: LossFunction) -> dict[str, float]:
        """Gradients of the global batch, divided by its token count; returns the reduced metrics."""
        for chunk in self._chunks:
            chunk.train()
        self.optimizer.zero_grad()
        local = forward_backward(self._chunks, batches, self._statistics, loss)
        return reduce_metrics(local, self.groups.world, contributes=dist.get_rank(self.groups.tp) == 0)

    def apply(self, metrics: dict[str, float]) -> StepResult:
        """Step with the accumulated gradients; skipped when their norm is not finite."""
        applied, norm = self.optimizer.step()
        self.policy_version += int(applied)
        return StepResult(
            policy_version=self.policy_version,
            grad_norm=norm,
            learning_rate=float(self.optimizer.megatron.param_groups[0]["lr"]),
            skipped=not applied,
            metrics=metrics,
        )

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Log-probabilities ``[T]`` of the labels of each micro-batch; empty but on the last pipeline stage."""
        self.optimizer.finish_overlapped_gather()
        return [logprobs for logprobs, _ in forward_logprobs(self._chunks, batches, self._statistics)]

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Stream the full weights by Hugging Face name (a collective; see ``Bridge.export``).

        Not to be called between ``accumulate`` and ``apply``: Megatron would then skip the next parameter gather.
        """
        self.optimizer.finish_overlapped_gather()
        return self.bridge.export()

    def count_micro_batches(self, needed: int) -> int:
        """The number of micro-batches that every rank runs, given how many this one needs."""
        count = torch.tensor(max(1, needed))
        device = next(self.models[0].parameters()).device
        count = count.to(device)
        dist.all_reduce(count, dist.ReduceOp.MAX, group=self.groups.world)
        # Megatron's interleaved schedule needs a multiple of the pipeline size.
        multiple = self.layout.pp if self.layout.vpp > 1 else 1
        return -(-int(count) // multiple) * multiple

    def save(
        self,
        folder: Path,
        step: int,
        state: dict[str, Any],
        keep: int,
        best: int | None = None,
        also: Callable[[Path], None] | None = None,
    ) -> Path:
        """Write a checkpoint of this step; ``state`` is the caller's own, as JSON. See ``save_checkpoint``."""
        self.optimizer.finish_overlapped_gather()
        state = {**state, "policy_version": self.policy_version}
        return save_checkpoint(folder, step, self.models, self.optimizer, state, keep, best, also)

    def load(self, checkpoint: Path, *, same_layout: bool = True) -> dict[str, Any]:
        """Restore a checkpoint, also one of another layout, and return the caller's state."""
        state = read_state(checkpoint)
        load_checkpoint(checkpoint, self.models, self.optimizer, same_layout=same_layout)
        self.policy_version = state["policy_version"]
        return state
