"""A run with adapters: stopped and continued bit for bit, its folders and its checkpoint hold the same policy."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_dppo.hf.weight_files import FolderWeights
from tests.e2e.forked import train_forked
from tests.e2e.runs import environment, flags, from_base, step_records, train, without_timings
from tests.reference_run import assert_trains

pytestmark = pytest.mark.e2e
RANK, ALPHA = 4, 16.0
STEPS = 3


@pytest.fixture(scope="module")
def run_flags(base_model: Path) -> list[str]:
    return from_base(
        base_model,
        run__num_steps=STEPS,
        lora__rank=RANK,
        lora__alpha=ALPHA,
        rollout__prompts_per_step=4,
        rollout__samples_per_prompt=4,
        optimizer__lr=0.01,
        optimizer__lr_decay_style="constant",
        optimizer__lr_warmup_steps=0,
        reward__kl_coef=0.01,
        eval__max_prompts=4,
        rollout__dtype="fp32",
        checkpoint__save_every=1,
        log__curves="false",
    )


@pytest.fixture(scope="module")
def folder(run_flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("lora") / "run"
    result = train([*run_flags, *flags(run__output_dir=target)], processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    assert_trains(target)
    return target


def merged(folder: Path, base: Path) -> dict[str, torch.Tensor]:
    """W + s B A from the adapter's folder, by PEFT's names."""
    adapter = {name: value.double() for name, value in load_file(folder / "adapter_model.safetensors").items()}
    weights = FolderWeights(base)
    actual = {}
    for name in weights.names():
        module = "base_model.model." + name.removesuffix(".weight")
        actual[name] = weights[name].double()
        if f"{module}.lora_A.weight" in adapter:
            b, a = adapter.pop(f"{module}.lora_B.weight"), adapter.pop(f"{module}.lora_A.weight")
            actual[name] += ALPHA / RANK * b @ a
    assert not adapter, sorted(adapter)[:3]
    return actual


def test_both_exports_are_the_same_policy(folder: Path, base_model: Path) -> None:
    exported, expected = FolderWeights(folder / "hf"), merged(folder / "hf-adapter", base_model)
    base = FolderWeights(base_model)
    moved = 0
    for name, value in expected.items():
        torch.testing.assert_close(exported[name].double(), value, rtol=1e-6, atol=1e-6)
        moved += not torch.equal(exported[name], base[name])
    assert moved == 2 * (4 + 3 * 8), "every layer of attention and of the experts, and nothing else"
    config = json.loads((folder / "hf-adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (RANK, ALPHA, "LORA")
    records = step_records(folder)
    assert abs(records[0]["train/kl_in_reward"]) < 1e-6 < 1e-3 < records[-1]["train/kl_in_reward"]
    assert records[-1]["train/abs_prob_diff_first"] < 1e-5, "the engine samples with the merged weights"


@pytest.mark.long
def test_a_stopped_run_continues_bit_for_bit(run_flags: list[str], folder: Path, tmp_path: Path) -> None:
    arguments = [*run_flags, *flags(run__output_dir=tmp_path / "run")]
    assert train([*arguments, *flags(run__num_steps=2)], processes=2).returncode == 0
    result = train(arguments, processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    assert without_timings(tmp_path / "run")[-1] == without_timings(folder)[-1]
    adapters, expected = (load_file(f / "hf-adapter/adapter_model.safetensors") for f in (tmp_path / "run", folder))
    assert all(torch.equal(adapters[name], expected[name]) for name in expected)
    refused = train([*arguments, *flags(run__num_steps=4, lora__rank=2)], processes=2)
    assert refused.returncode and "'lora': [4, " in refused.stderr + refused.stdout


def test_a_checkpoint_becomes_a_hugging_face_folder(folder: Path, base_model: Path, tmp_path: Path) -> None:
    """A checkpoint of two ranks, by one process, on the base model's weights."""
    newest = folder / f"checkpoints/step_{STEPS:06d}"
    size = sum(file.stat().st_size for file in newest.glob("*.distcp"))
    assert size < os.path.getsize(base_model / "model.safetensors") * 3, "it holds adapters, not the base model"
    arguments = ["convert", "megatron-to-hf", str(newest), str(base_model), str(tmp_path / "hf"), "--dtype", "fp32"]
    result = train_forked(arguments, environment(), 1, timeout=240, entry="main")
    assert result.returncode == 0, result.stderr
    actual, expected = FolderWeights(tmp_path / "hf"), FolderWeights(folder / "hf")
    assert all(torch.equal(actual[name], expected[name]) for name in expected.names())
