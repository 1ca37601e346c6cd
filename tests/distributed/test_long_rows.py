"""Rows of many thousand tokens under context parallelism are those of one process: full attention and delta nets."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_dppo.data.training_samples import to_training_sample
from megatron_dppo.hf.folder import build_hf_model
from megatron_dppo.losses import policy_objective
from megatron_dppo.policy.update import Updater
from tests.distributed.parity import (
    LOSS,
    Case,
    build_trainer,
    config_for,
    gradient_reader,
    hf_config,
    on_cpu,
    randomize,
    worst,
)
from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.distributed

LAYERS = {"qwen3": 1, "qwen3_moe": 1, "qwen3_next": 2}
"""Layers of each family: one with full attention, for the last one after a gated delta net."""


def tiny(family: str) -> Any:
    config = hf_config(False, family=family)
    config.num_hidden_layers = LAYERS[family]
    config.layer_types = ["linear_attention", "full_attention"][-LAYERS[family] :]
    config.mlp_only_layers = []
    return randomize(build_hf_model(config, torch.float32, seed=0))


def train_on_a_row(rank: int, world_size: int, families: list[str], tokens: int, mask_size: int, folder: str) -> None:
    """Write loss, gradient norm and gradients of the first update of each family, on a row of two sequences."""
    from megatron.core import parallel_state

    from megatron_dppo.mcore.shims import apply_shims
    from megatron_dppo.parallel.platform import Platform
    from megatron_dppo_megatron_cpu import attention

    attention.MASK_SIZE = mask_size
    platform = Platform.detect(force_cpu=True)
    apply_shims(platform)
    generator = torch.Generator().manual_seed(0)
    samples = []
    for start, end in pairwise((0, tokens * 5 // 8, tokens)):
        ids = torch.randint(3, 117, (end - start,), generator=generator).tolist()
        logprobs = (-4.7 - torch.rand(end - start - 1, generator=generator)).tolist()
        samples.append(to_training_sample(ids[:1], ids[1:], logprobs, 1.0 - 2.0 * (start > 0)))
    for family in families:
        case = Case({"context_parallel_size": world_size}, family=family, micro_batch_tokens=tokens)
        trainer = build_trainer(case, tiny(family), platform, "fp32")
        (batch,) = Updater(trainer, config_for(case).train, LOSS).pack_batches(samples)
        metrics = trainer.accumulate([batch], policy_objective(LOSS))
        gradients = on_cpu(trainer.bridge.export(gradient_reader(trainer)))
        norm = trainer.apply(metrics).grad_norm
        if rank == 0:
            torch.save((metrics["loss"], norm, gradients), Path(folder) / f"{family}{world_size}")
        dist.barrier()
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize(
    ("tokens", "mask_size", "sizes", "families"),
    [
        (2048, 2**18, (2,), ["qwen3_next"]),
        pytest.param(32768, 2**25, (2, 4), ["qwen3", "qwen3_moe", "qwen3_next"], marks=pytest.mark.long),
    ],
)
def test_a_long_row_under_context_parallelism_is_that_of_one_process(
    tokens: int, mask_size: int, sizes: tuple[int, ...], families: list[str], tmp_path: Path
) -> None:
    for world_size in (1, *sizes):
        run_distributed(train_on_a_row, world_size, families, tokens, mask_size, str(tmp_path))
    for family in families:
        loss, norm, gradients = torch.load(tmp_path / f"{family}1")
        assert loss and norm > 0 and all(gradient.isfinite().all() for gradient in gradients.values())
        for world_size in sizes:
            other_loss, other_norm, other = torch.load(tmp_path / f"{family}{world_size}")
            assert other_loss == pytest.approx(loss, rel=1e-5), family
            assert other_norm == pytest.approx(norm, rel=1e-4), family
            assert worst(other, gradients) < 1e-4, family
