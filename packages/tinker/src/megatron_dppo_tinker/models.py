"""Models that clients train: one ``PolicyTrainer`` with adapters each, its steps and its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.config.model import LoraConfig
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import CheckpointError
from megatron_dppo.mcore.checkpoint.folder import STATE, checkpoints, read_state
from megatron_dppo.mcore.checkpoint.save_load import NO_MANIFEST, find_damage, load_model, save_model
from megatron_dppo.mcore.lora import trainable_module
from megatron_dppo.mcore.optim import AdamStep
from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.policy.trainer import PolicyTrainer
from megatron_dppo.run.policy_setup import build_trainer
from megatron_dppo.setup.inputs import ModelInputs
from megatron_dppo_tinker.errors import RequestError, require_finite
from megatron_dppo_tinker.losses import RequestLoss
from megatron_dppo_tinker.wire import Datum

_STATE_KEY = "tinker"
"""Key of a checkpoint's state that describes its adapters."""
_MLP = frozenset(["gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"])
"""Target modules of MLPs and experts; the others are those of attention."""

AdapterState = tuple[dict[str, Tensor], ...]
"""Adapters of each model chunk by parameter name."""


@dataclass(frozen=True)
class AdapterSpec:
    """Adapters that a client asks for."""

    rank: int
    seed: int
    train_mlp: bool = True
    train_attn: bool = True

    @classmethod
    def from_checkpoint(cls, checkpoint: Path) -> AdapterSpec:
        """Read the description of a checkpoint's adapters."""
        try:
            return cls(**read_state(checkpoint)[_STATE_KEY])
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{checkpoint} was not written by this server: {error!r}") from error

    @property
    def shape(self) -> tuple[int, bool, bool]:
        """Values that two models must share so that one can hold the adapters of the other."""
        return self.rank, self.train_mlp, self.train_attn

    def state(self, lora: LoraConfig) -> dict[str, Any]:
        """Return the state of a checkpoint; ``megatron-dppo convert`` reads the section ``lora`` in it."""
        return {_STATE_KEY: asdict(self), "config": {"lora": lora.model_dump()}}

    def config(self, served: LoraConfig) -> LoraConfig:
        """Return the ``[lora]`` section of this model; ``served`` has the scale and the possible target modules."""
        targets = [name for name in served.target_modules if (self.train_mlp if name in _MLP else self.train_attn)]
        if not targets:
            raise RequestError(
                f"train_mlp = {self.train_mlp} and train_attn = {self.train_attn} leave none of lora.target_modules = "
                f"{served.target_modules}. This server adapts no output layer (train_unembed)"
            )
        values = served.model_dump(exclude_unset=True) | {"rank": self.rank, "target_modules": targets}
        return LoraConfig.model_validate(values)


@dataclass(frozen=True)
class ModelParts:
    """Parts of the server from which every model is built."""

    config: Config
    inputs: ModelInputs
    groups: ParallelGroups
    platform: Platform

    def build(self, spec: AdapterSpec) -> TrainedModel:
        """Return a model with new adapters, which change nothing yet."""
        run = self.config.run.model_copy(update={"seed": spec.seed})
        config = self.config.model_copy(update={"lora": spec.config(self.config.lora), "run": run})
        trainer = build_trainer(config, self.inputs, self.groups, self.platform)
        hf_config = self.inputs.hf_config
        return TrainedModel(spec, config.lora, trainer, hf_config, self.config.train.micro_batch_tokens)


class TrainedModel:
    """One model with its adapters and optimizer."""

    def __init__(
        self, spec: AdapterSpec, lora: LoraConfig, trainer: PolicyTrainer, hf_config: Any, micro_batch_tokens: int
    ) -> None:
        self.spec = spec
        self._state = spec.state(lora)
        self.trainer = trainer
        self._vocab_size: int = hf_config.vocab_size
        self._max_tokens: int = hf_config.max_position_embeddings
        self._micro_batch_tokens = micro_batch_tokens

    def forward_backward(
        self, data: Sequence[Datum], loss: RequestLoss, *, forward_only: bool
    ) -> tuple[list[Tensor], dict[str, float]]:
        """Add the loss's gradient (not if ``forward_only``); return each datum's log-probabilities, and metrics."""
        if not data:
            raise RequestError("the request has no data")
        samples = [loss.sample(datum, self._vocab_size, self._max_tokens) for datum in data]
        packed = self.trainer.pack(samples, self._micro_batch_tokens)
        if forward_only:
            rows = [row.float().cpu() for row in self.trainer.logprobs(packed.batches)]
        else:
            rows = self.trainer.accumulate_sum(packed.batches, loss.objective)
        logprobs = [torch.zeros(0)] * len(samples)
        for index, where, number in packed.positions(samples):
            logprobs[index] = require_finite(rows[number][where].clone())
        outputs = [loss.value(sample, each) for sample, each in zip(samples, logprobs, strict=True)]
        # Names end with the reduction by which the client joins the parts of a split batch.
        metrics = {
            "loss:sum": sum(float(output.loss_sum) for output in outputs),
            "tokens:sum": float(sum(sample.num_tokens for sample in samples)),
            "masked_tokens:sum": float(
                sum(
                    int((~output.keep_mask & (sample.advantages != 0)).sum())
                    for sample, output in zip(samples, outputs, strict=True)
                )
            ),
        }
        return logprobs, metrics

    def optim_step(self, settings: AdamStep) -> dict[str, float]:
        """Update the adapters with the accumulated gradients, and return the metrics.

        With a gradient norm that is not finite nothing changes, and the gradients are dropped.
        """
        result = self.trainer.apply_sum(settings)
        if result.skipped:
            raise RequestError(f"the gradient norm is {result.grad_norm}: no weight was changed, the gradients are 0")
        return {"grad_norm:mean": result.grad_norm, "learning_rate:mean": result.learning_rate}

    def adapters(self) -> AdapterState:
        """Return a copy of the adapters."""
        return tuple(
            {name: value.detach().clone() for name, value in trainable_module(chunk).named_parameters()}
            for chunk in self.trainer.models
        )

    @contextmanager
    def holding(self, adapters: AdapterState) -> Iterator[None]:
        """Hold other adapters inside the block; afterwards the model's own are back bit for bit."""
        previous = self.adapters()
        self._set_adapters(adapters)
        try:
            yield
        finally:
            self._set_adapters(previous)

    @torch.no_grad()
    def _set_adapters(self, adapters: AdapterState) -> None:
        for chunk, values in zip(self.trainer.models, adapters, strict=True):
            for name, parameter in trainable_module(chunk).named_parameters():
                parameter.copy_(values[name])

    def save_state(self, folder: Path) -> None:
        """Write adapters and optimizer; an older checkpoint of the folder is deleted after the new one is complete."""
        self.trainer.save(folder, self.trainer.policy_version, self._state, 1).wait()

    def save_adapters(self, folder: Path) -> None:
        """Write the adapters alone to a new folder."""
        save_model(folder, self.trainer.models, {STATE: json.dumps(self._state, indent=2)})

    def load_state(self, checkpoint: Path, *, optimizer: bool) -> None:
        """Restore the adapters, and with ``optimizer`` also moments, update count and random states."""
        damage = find_damage(checkpoint)
        if damage and damage != NO_MANIFEST:
            raise CheckpointError(f"{checkpoint} is damaged: {damage}")
        if optimizer:
            self.trainer.load(checkpoint)
            return
        load_model(checkpoint, self.trainer.models, groups=self.trainer.groups)
        # fp32 copies of bf16 weights belong to the optimizer.
        self.trainer.optimizer.megatron.reload_model_params()

    def read_adapters(self, checkpoint: Path) -> AdapterState:
        """Return the adapters of a checkpoint; the model's own stay."""
        with self.holding(self.adapters()):
            load_model(checkpoint, self.trainer.models, groups=self.trainer.groups)
            return self.adapters()


def newest_checkpoint(folder: Path) -> Path:
    """Return the folder that holds the files of a saved name."""
    if (folder / STATE).is_file():
        return folder
    states = checkpoints(folder) if folder.is_dir() else []
    if not states:
        raise RequestError(f"there is no checkpoint in {folder}")
    return states[-1]
