"""Arguments that decide the noise on the layers. Gradients: tests/distributed/test_layer_noise.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_dppo.config.train import LayerNoiseConfig
from megatron_dppo.data.training_samples import RowShape, pack, to_training_sample
from megatron_dppo.errors import ConfigError
from megatron_dppo.mcore.layer_noise import LayerNoise, RowNoise
from megatron_dppo.policy.trainer import PolicyTrainer
from megatron_dppo.types import TrainingSample

HIDDEN = 48
SAMPLES = [
    to_training_sample([1, 2, 3], list(range(10, 10 + length)), [-1.0] * length, advantage=1.0)
    for length in (40, 7, 200)
]


def drawn(samples: list[TrainingSample], *, name: str = "0/0", layer: int = 0, **shape: int) -> list[Tensor]:
    """The noise of each sample's tokens, and of what a row has beside them."""
    batch = pack(samples, RowShape(**shape))
    noise = RowNoise.from_batch(batch, None, part=(0, 1), name=name)
    row = noise.generate(layer, torch.empty(len(batch.tokens), 1, HIDDEN))[:, 0]
    starts = batch.cu_seqlens.tolist()
    parts = [row[start : start + sample.num_tokens] for start, sample in zip(starts, samples, strict=False)]
    assert row.count_nonzero() == sum(part.count_nonzero() for part in parts), "padding has noise"
    return parts


def test_noise_is_standard_normal_and_independent_over_tokens_layers_versions_and_seeds() -> None:
    rows = [drawn(SAMPLES, name=name, layer=layer) for name in ("0/0", "0/1", "1/0") for layer in (0, 1)]
    together = torch.stack([torch.cat(row).flatten() for row in rows])
    count = together.shape[1]
    assert count == HIDDEN * sum(sample.num_tokens for sample in SAMPLES)
    assert together.mean(1).abs().max() < 5 / count**0.5
    assert (together.var(1) - 1).abs().max() < 5 * (2 / count) ** 0.5
    off_diagonal = torch.corrcoef(together) - torch.eye(len(rows))
    assert off_diagonal.abs().max() < 5 / count**0.5
    tokens = torch.corrcoef(torch.cat(rows[0])) - torch.eye(count // HIDDEN)
    assert tokens.abs().max() < 6 / HIDDEN**0.5


def test_noise_of_a_sequence_does_not_depend_on_packing_or_padding() -> None:
    alone = [drawn([sample])[0] for sample in SAMPLES]
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        for shape in ({}, {"sequence_multiple": 8}, {"sequence_multiple": 4, "row_multiple": 64}):
            actual = drawn([SAMPLES[i] for i in order], **shape)
            for i, part in zip(order, actual, strict=True):
                torch.testing.assert_close(part, alone[i], rtol=0, atol=0)


def test_sequence_parallel_ranks_have_their_rows() -> None:
    batch = pack(SAMPLES, RowShape(row_multiple=4))
    whole = RowNoise.from_batch(batch, None, part=(0, 1), name="0/0").generate(
        3, torch.empty(len(batch.tokens), 1, HIDDEN)
    )
    part = torch.empty(len(batch.tokens) // 4, 1, HIDDEN)
    actual = [RowNoise.from_batch(batch, None, part=(rank, 4), name="0/0").generate(3, part) for rank in range(4)]
    torch.testing.assert_close(torch.cat(actual), whole, rtol=0, atol=0)


@pytest.mark.parametrize("settings", [{"start_layer": 4}, {"end_layer": 5}])
def test_layers_outside_the_model_are_rejected(settings: dict[str, Any]) -> None:
    assert LayerNoiseConfig(std=1.0, start_layer=1, end_layer=3).layers(4) == range(1, 3)
    with pytest.raises(ConfigError, match="model's 4 layers"):
        LayerNoiseConfig(std=1.0, **settings).layers(4)


def learned(std: float, lr: float) -> LayerNoise:
    """Noise of two layers on one rank."""
    decoder = SimpleNamespace(
        layers=[
            SimpleNamespace(layer_number=1 + i, register_forward_pre_hook=lambda hook, with_kwargs: None)
            for i in range(2)
        ]
    )
    model: Any = SimpleNamespace(parameters=lambda: iter([torch.zeros(1)]), decoder=decoder)
    config: Any = SimpleNamespace(num_layers=2, sequence_parallel=False, finalize_model_grads_func=None)
    groups: Any = SimpleNamespace(world=None, tp=None)
    return LayerNoise([model], config, LayerNoiseConfig(std=std, lr=lr), groups, 0, (0.9, 0.95, 1e-2))


def test_only_applied_updates_move_the_standard_deviations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam by hand, with gradients that were multiplied by the loss scale of their update."""
    one_rank = SimpleNamespace(get_world_size=lambda group: 1, get_rank=lambda group: 0)
    monkeypatch.setattr("megatron_dppo.mcore.layer_noise.dist", one_rank)
    noise = learned(0.1, 0.5)
    first, second, log_std, count = np.zeros(2), np.zeros(2), np.full(2, np.log(0.1)), 0
    for gradient, scale, applied in (
        ([0.02, -0.3], 8.0, True),
        ([np.inf, np.nan], 8.0, False),
        ([0.5, 0.5], 4.0, False),
        ([0.01, 0.2], 4.0, True),
        ([-0.04, 0.1], 1.0, True),
    ):
        noise.gradient = torch.tensor(gradient, dtype=torch.float64) * scale
        before = np.exp(log_std)
        metrics = noise.step(scale, applied=applied)
        if applied:
            count += 1
            first = 0.9 * first + 0.1 * np.array(gradient)
            second = 0.95 * second + 0.05 * np.array(gradient) ** 2
            corrected = np.sqrt(second / (1 - 0.95**count)) + 1e-2
            log_std = log_std - 0.5 * first / (1 - 0.9**count) / corrected
        np.testing.assert_allclose(noise.log_std.numpy(), log_std, rtol=1e-12)
        assert metrics["layer_noise"] == pytest.approx(before.mean()), "the update was made with the earlier values"


def test_the_noise_skips_the_updates_that_the_trainer_skips_with_their_loss_scale() -> None:
    steps: list[tuple[float, bool]] = []
    scale = SimpleNamespace(value=16.0)

    def noise_step(loss_scale: float, *, applied: bool) -> dict[str, float]:
        steps.append((loss_scale, applied))
        return {}

    for applied in (False, True):

        def step(applied: bool = applied) -> Any:
            scale.value /= 2
            return SimpleNamespace(applied=applied, grad_norm=1.0, has_lower_scale=True)

        trainer: Any = PolicyTrainer.__new__(PolicyTrainer)
        trainer.optimizer = SimpleNamespace(
            loss_scale=scale, step=step, megatron=SimpleNamespace(param_groups=[{"lr": 0.1}])
        )
        trainer.noise = SimpleNamespace(step=noise_step)
        trainer.policy_version = 3
        result = trainer.apply({})
        assert (result.skipped, result.policy_version, trainer.policy_version) == (
            not applied,
            3 + applied,
            3 + applied,
        )
    assert steps == [(16.0, False), (8.0, True)]
