"""What noise on the layers is a function of, and what it is not. Gradients: tests/distributed/test_layer_noise.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.config.train import LayerNoiseConfig
from megatron_dppo.data.training_samples import RowShape, pack, to_training_sample
from megatron_dppo.errors import ConfigError
from megatron_dppo.mcore.layer_noise import RowNoise
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


def test_noise_is_the_sequence_s_own_wherever_it_stands_and_however_it_is_padded() -> None:
    alone = [drawn([sample])[0] for sample in SAMPLES]
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        for shape in ({}, {"sequence_multiple": 8}, {"sequence_multiple": 4, "row_multiple": 64}):
            found = drawn([SAMPLES[i] for i in order], **shape)
            for i, part in zip(order, found, strict=True):
                torch.testing.assert_close(part, alone[i], rtol=0, atol=0)


def test_sequence_parallel_ranks_have_their_rows() -> None:
    batch = pack(SAMPLES, RowShape(row_multiple=4))
    whole = RowNoise.from_batch(batch, None, part=(0, 1), name="0/0").generate(
        3, torch.empty(len(batch.tokens), 1, HIDDEN)
    )
    part = torch.empty(len(batch.tokens) // 4, 1, HIDDEN)
    found = [RowNoise.from_batch(batch, None, part=(rank, 4), name="0/0").generate(3, part) for rank in range(4)]
    torch.testing.assert_close(torch.cat(found), whole, rtol=0, atol=0)


@pytest.mark.parametrize("settings", [{"start_layer": 4}, {"end_layer": 5}])
def test_layers_outside_the_model_are_rejected(settings: dict[str, Any]) -> None:
    assert LayerNoiseConfig(std=1.0, start_layer=1, end_layer=3).layers(4) == range(1, 3)
    with pytest.raises(ConfigError, match="model's 4 layers"):
        LayerNoiseConfig(std=1.0, **settings).layers(4)
