"""Supervised steps on two ranks give the weights of transformers in float64 after the same updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_dppo.hf.folder import stream_model
from megatron_dppo.parallel.platform import Platform
from tests.distributed.parity import (
    TOLERANCE,
    Case,
    HFSide,
    build_trainer,
    config_for,
    on_cpu,
    samples,
    use_small_chunks,
    worst,
)
from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.distributed

STEPS, BATCH = 4, 2
CASE = Case({"expert_model_parallel_size": 2}, family="qwen3_next")


def expected_weights() -> dict[str, torch.Tensor]:
    """Each update has the mean over all tokens of the responses of its batch."""
    hf = HFSide(CASE)
    for step in range(STEPS):
        batch = hf.samples[step * BATCH : (step + 1) * BATCH]
        hf.optimizer.zero_grad()
        (-torch.cat([hf.logprobs(sample)[sample.loss_mask] for sample in batch]).mean()).backward()
        hf.step()
    return dict(stream_model(hf.model))


def check(rank: int, world_size: int) -> None:
    from megatron_dppo.mcore.shims import apply_shims

    platform = Platform.detect(force_cpu=True)
    apply_shims(platform)
    from megatron_dppo_lab.base_model import train_supervised

    use_small_chunks()
    trainer = build_trainer(CASE, HFSide(CASE).model, platform, "fp32")
    config = config_for(Case(), run={"num_steps": STEPS}, rollout={"prompts_per_step": BATCH})
    reported: list[tuple[int, int]] = []
    data: Any = samples()
    train_supervised(trainer, data, config, lambda step, num_steps, loss: reported.append((step, num_steps)))
    assert reported == [(step + 1, STEPS) for step in range(STEPS)]
    error = worst(on_cpu(trainer.export_weights()), expected_weights())
    assert error < TOLERANCE, f"weights off by {error:.1e}"


def test_supervised_steps_equal_those_of_transformers_in_float64() -> None:
    run_distributed(check, 2, timeout=480)
