"""Noise on the layers' inputs: updates on a layout against transformers in float64 with the same noise."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.config.train import LayerNoiseConfig
from megatron_dppo.data.training_samples import pack
from megatron_dppo.hf.folder import stream_model
from megatron_dppo.losses import policy_objective
from megatron_dppo.mcore.layer_noise import RowNoise
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.policy.update import Updater
from megatron_dppo.types import TrainingSample
from tests.distributed.families import in_float64
from tests.distributed.layouts import EP
from tests.distributed.parity import (
    BETAS,
    EPS,
    LOSS,
    LR,
    TOLERANCE,
    UPDATES,
    Case,
    HFSide,
    build_trainer,
    config_for,
    gradient_reader,
    logprob_error,
    on_cpu,
    relative_error,
    samples,
    worst,
)

SETTINGS = {"std": 0.05, "lr": 0.1, "start_layer": 1, "end_layer": 4}
"""Layers 1 to 3 of 4; a rate at which two updates change the noise."""


class NoisySide(HFSide):
    """The transformers model in float64, whose layers' inputs get noise; its size is learned."""

    def __init__(self, case: Case, seed: int) -> None:
        super().__init__(case, shared=True)
        self.model = in_float64(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0)
        self.log_std = torch.full((3,), math.log(SETTINGS["std"]), dtype=torch.float64, requires_grad=True)
        self._adam = torch.optim.Adam([self.log_std], lr=SETTINGS["lr"], betas=BETAS, eps=EPS)
        self.version, self._seed = 0, seed
        self._noise: RowNoise | None = None
        for i in range(3):
            self.model.model.layers[1 + i].register_forward_pre_hook(lambda _, args, i=i: self._add(i, args))

    def _add(self, i: int, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden: Tensor = args[0]
        assert self._noise is not None
        noise = self._noise.generate(1 + i, torch.empty(hidden.shape[1], 1, hidden.shape[2]))
        return hidden + self.log_std[i].exp() * noise.double().transpose(0, 1), *args[1:]

    def logprobs(self, sample: TrainingSample) -> Tensor:
        self._noise = RowNoise.from_batch(pack([sample]), None, part=(0, 1), name=f"{self._seed}/{self.version}")
        return super().logprobs(sample)

    def sum_over_ranks(self, loss: float, size: float) -> tuple[float, float]:
        assert self.log_std.grad is not None
        dist.all_reduce(self.log_std.grad)
        return super().sum_over_ranks(loss, size)

    def step(self) -> float:
        norm = super().step()
        assert self.log_std.grad is not None
        self.gradient = self.log_std.grad.clone()
        self._adam.step()
        self._adam.zero_grad()
        self.version += 1
        return norm


def measure(case: Case, platform: Platform, dtype: str = "fp32", **sections: dict[str, Any]) -> dict[str, float]:
    """Relative errors of loss, every gradient, the gradient of the noise, and both after the updates."""
    sections |= {"train": {"micro_batch_tokens": case.micro_batch_tokens}}
    config = config_for(case, dtype, **sections)
    side = NoisySide(case, config.run.seed)
    trainer = build_trainer(case, side.model.float(), platform, dtype, noise=LayerNoiseConfig(**SETTINGS), **sections)
    side.model.double()
    local_samples = samples()[trainer.dp_rank :: trainer.layout.dp]
    batches = Updater(trainer, config.train, LOSS).pack_batches(local_samples)
    errors = dict.fromkeys(("loss", "gradient", "noise_gradient"), 0.0)
    errors["scoring"] = scoring_error(trainer, case, local_samples)
    for step in range(UPDATES):
        trainer.optimizer.set_step(step)
        expected, size = side.backward()
        metrics = trainer.accumulate(batches, policy_objective(LOSS))
        errors["loss"] = max(errors["loss"], abs(metrics["loss"] - expected) / size)
        result, own = trainer.noise.gradient, side.log_std.grad
        assert own is not None
        errors["noise_gradient"] = max(errors["noise_gradient"], relative_error(result, own))
        if step == 0:
            errors["gradient"] = worst(on_cpu(trainer.bridge.export(gradient_reader(trainer))), side.gradients())
        trainer.apply(metrics)
        side.step()
    errors["noise"] = relative_error(trainer.noise.log_std, side.log_std.detach())
    assert relative_error(side.log_std.detach(), torch.full((3,), math.log(SETTINGS["std"]))) > 0.01
    errors["weights"] = worst(on_cpu(trainer.export_weights()), dict(stream_model(side.model)))
    return errors


def scoring_error(trainer: Any, case: Case, local_samples: list[TrainingSample]) -> float:
    """Return the distance of log-probabilities from transformers' *without* noise, which is for updates alone."""
    side, updater = HFSide(case), Updater(trainer, config_for(case).train, LossConfig(name="minirl"))
    return logprob_error(updater, side, local_samples)


def half(rank: int, world_size: int) -> None:
    """In fp16 the gradient of the noise has the loss scale, which is taken out before it is followed."""
    from megatron_dppo.mcore.shims import apply_shims

    platform = Platform.detect(force_cpu=True)
    apply_shims(platform)
    case = Case(EP)
    trainer = build_trainer(case, HFSide(case).model, platform, "fp16", noise=LayerNoiseConfig(**SETTINGS))
    side = NoisySide(case, config_for(case).run.seed)
    batches = Updater(trainer, config_for(case).train, LOSS).pack_batches(samples()[trainer.dp_rank :: 2])
    side.backward()
    side.step()
    scale = trainer.optimizer.loss_scale.value
    trainer.apply(trainer.accumulate(batches, policy_objective(LOSS)))
    own = trainer.noise.log_std.grad
    assert scale == 16
    adam_of = relative_error(trainer.noise.log_std, side.log_std.detach())
    assert relative_error(own, side.gradient) < 0.05, (own, side.gradient)
    assert adam_of < 1e-3, (trainer.noise.log_std, side.log_std)


def run(rank: int, world_size: int, cases: list[Case]) -> None:
    """Every layout."""
    from megatron_dppo.mcore.shims import apply_shims

    platform = Platform.detect(force_cpu=True)
    apply_shims(platform)
    from megatron.core import parallel_state

    for case in cases:
        errors = measure(case, platform)
        if rank == 0:
            print(case, {name: f"{value:.1e}" for name, value in errors.items()})
        assert all(value < TOLERANCE for value in errors.values()), f"{case}, rank {rank}: {errors}"
        dist.barrier()
        parallel_state.destroy_model_parallel()
