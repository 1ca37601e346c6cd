"""A checkpoint of one layout continues on another: it has the same bits, and the next update is the reference's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_dppo.config.layout import layer_split
from megatron_dppo.hf.folder import stream_model
from megatron_dppo.losses import policy_objective
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.policy.update import Updater
from tests.distributed.parity import (
    LOSS,
    TOLERANCE,
    UPDATES,
    Case,
    HFSide,
    build_trainer,
    config_for,
    on_cpu,
    samples,
    worst,
)
from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.distributed

TP = {"tensor_model_parallel_size": 2}
PP = {"pipeline_model_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}
CP = {"context_parallel_size": 2}


def platform() -> Platform:
    from megatron_dppo.mcore.shims import apply_shims

    here = Platform.detect(force_cpu=True)
    apply_shims(here)
    return here


def update(trainer: Any, step: int) -> None:
    local_samples = samples()[trainer.dp_rank :: trainer.layout.dp]
    batches = Updater(trainer, config_for(Case()).train, LOSS).pack_batches(local_samples)
    trainer.optimizer.set_step(step)
    trainer.update(batches, policy_objective(LOSS))


def case_of(layout: dict[str, Any], model: dict[str, Any]) -> Case:
    """A layout whose dictionary may also split the layers unevenly."""
    split = layer_split(layout)
    parallel = {name: value for name, value in layout.items() if name not in split}
    return Case(parallel, **model, transformer=split)


def save(
    rank: int,
    world_size: int,
    layouts: list[dict[str, Any]],
    folder: str,
    model: dict[str, Any] | None = None,
    dtype: str = "fp32",
) -> None:
    """All updates but the last on each layout, a checkpoint, and weights by name. ``model`` are fields of ``Case``."""
    model = model or {}
    here = platform()
    from megatron.core import parallel_state

    for i, layout in enumerate(layouts):
        case = case_of(layout, model)
        trainer = build_trainer(case, HFSide(Case(**model)).model, here, dtype)
        for step in range(UPDATES - 1):
            update(trainer, step)
        trainer.save(Path(folder) / f"{world_size}-{i}", UPDATES - 1, {}, keep=1)
        weights = {name: tensor.clone() for name, tensor in trainer.export_weights()}
        if rank == 0:
            torch.save(weights, Path(folder) / f"{world_size}-{i}.pt")
        dist.barrier()
        parallel_state.destroy_model_parallel()


def load(
    rank: int,
    world_size: int,
    cases: list[tuple[str, dict[str, Any]]],
    folder: str,
    model: dict[str, Any] | None = None,
    dtype: str = "fp32",
) -> None:
    """Each checkpoint on each layout: the same weights; after one more update those of transformers.

    The update of a dtype other than fp32 has no reference.
    """
    model = model or {}
    here = platform()
    from megatron.core import parallel_state

    from megatron_dppo.mcore.checkpoint.folder import checkpoints

    hf = HFSide(Case(**model), shared=True)
    for _ in range(UPDATES):
        hf.backward()
        hf.step()
    for name, layout in cases:
        case = case_of(layout, model)
        trainer = build_trainer(case, HFSide(Case(**model)).model, here, dtype)
        trainer.load(checkpoints(Path(folder) / name)[0], same_layout=False)
        assert trainer.policy_version == UPDATES - 1
        saved = torch.load(Path(folder) / f"{name}.pt", weights_only=True)
        for weight, tensor in trainer.export_weights():
            expected = saved.pop(weight)
            assert tensor.dtype == expected.dtype and torch.equal(tensor, expected), f"{name} on {layout}: {weight}"
        assert not saved
        update(trainer, UPDATES - 1)
        error = worst(on_cpu(trainer.export_weights()), dict(stream_model(hf.model)))
        assert error < TOLERANCE or dtype != "fp32", f"checkpoint {name} on {layout}: weights off by {error:.1e}"
        dist.barrier()
        parallel_state.destroy_model_parallel()


def test_checkpoints_continue_on_other_layouts(tmp_path: Path) -> None:
    folder = str(tmp_path)
    run_distributed(save, 2, [TP, PP, EP, {}], folder)
    run_distributed(load, 1, [("2-0", {}), ("2-1", {})], folder)
    cases = [("2-0", PP), ("2-3", TP), ("2-0", EP)]
    # Other models go between these layouts below.
    if os.environ.get("EVERYTHING"):
        run_distributed(load, 1, [("2-3", {})], folder)
        cases += [("2-1", TP), ("2-0", {}), ("2-2", TP)]
    run_distributed(load, 2, cases, folder)
    run_distributed(load, 4, [("2-2", {**EP, **TP}), ("2-2", {"expert_model_parallel_size": 4})], folder)


def test_checkpoints_continue_on_other_splits_of_the_layers(tmp_path: Path) -> None:
    first = {**PP, "num_layers_in_first_pipeline_stage": 3}
    last = {**PP, "num_layers_in_last_pipeline_stage": 3}
    folder = str(tmp_path)
    run_distributed(save, 2, [first], folder, {"dense_layers": (1,)})
    table = {**PP, "pipeline_model_parallel_layout": "E|ttttL"}
    run_distributed(load, 2, [("2-0", last), ("2-0", table), ("2-0", TP)], folder, {"dense_layers": (1,)})


def test_checkpoints_of_norms_over_heads_continue_on_other_layouts(tmp_path: Path) -> None:
    folder = str(tmp_path)
    run_distributed(save, 2, [TP, {}], folder, {"family": "olmoe"})
    run_distributed(load, 2, [("2-0", {}), ("2-1", TP)], folder, {"family": "olmoe"})


# Of a model with one dense layer the test of other splits has the same layouts.
@pytest.mark.long
@pytest.mark.parametrize("dense_layers", [(2,), (0, 1)])
def test_checkpoints_of_a_model_with_dense_layers_continue_on_other_layouts(
    dense_layers: tuple[int, ...], tmp_path: Path
) -> None:
    folder = str(tmp_path)
    run_distributed(save, 2, [TP, PP], folder, {"dense_layers": dense_layers})
    run_distributed(load, 1, [("2-1", {})], folder, {"dense_layers": dense_layers})
    run_distributed(load, 2, [("2-0", PP), ("2-1", TP), ("2-1", PP)], folder, {"dense_layers": dense_layers})


# Parts of one weight that are cut separately (linear attention), and weights that no tensor parallelism cuts.
@pytest.mark.parametrize("family", ["qwen3_next", pytest.param("qwen3_5_moe_text", marks=pytest.mark.long)])
def test_checkpoints_of_a_family_continue_on_other_layouts(family: str, tmp_path: Path) -> None:
    folder, model = str(tmp_path), {"family": family}
    run_distributed(save, 2, [TP, EP], folder, model)
    cases = [("2-0", CP), ("2-1", TP)]
    # Layouts on which these weights are as whole as under context parallelism.
    if os.environ.get("EVERYTHING"):
        cases += [("2-0", EP), ("2-1", PP)]
    run_distributed(load, 2, cases, folder, model)


# Sinks and biases of experts. Tensor parallelism needs expert parallelism.
def test_checkpoints_of_sinks_and_experts_with_biases_continue_on_other_layouts(tmp_path: Path) -> None:
    folder, model = str(tmp_path), {"family": "gpt_oss"}
    run_distributed(save, 2, [{**TP, **EP}, {}], folder, model)
    cases = [("2-0", EP), ("2-1", {**TP, **EP})]
    if os.environ.get("EVERYTHING"):
        cases += [("2-0", CP), ("2-0", PP), ("2-1", EP)]
        run_distributed(load, 1, [("2-0", {}), ("2-1", {})], folder, model)
        further = [("2-0", {**TP, "expert_model_parallel_size": 4}), ("2-1", {**TP, **PP, **EP})]
        run_distributed(load, 4, further, folder, model)
    run_distributed(load, 2, cases, folder, model)


def test_a_bf16_checkpoint_with_weights_in_fp32_has_the_same_bits_on_another_layout(tmp_path: Path) -> None:
    folder, model = str(tmp_path), {"family": "qwen3_5_moe_text"}
    run_distributed(save, 2, [TP], folder, model, "bf16")
    run_distributed(load, 2, [("2-0", EP), ("2-0", PP)], folder, model, "bf16")
