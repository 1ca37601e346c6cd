"""Folders of gpt-oss in MXFP4, as published: what they hold by the specification and by transformers, and exports."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_dppo.errors import CheckpointError
from megatron_dppo.export.hf_folder import save_hf_folder
from megatron_dppo.hf.folder import build_hf_model, copy_into_model, read_hf_config, stream_folder, stream_model
from megatron_dppo.hf.mxfp4 import dequantize
from megatron_dppo.hf.weight_files import FolderWeights
from tests.distributed.parity import hf_reference, samples

SPECIFIED = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""Positive numbers of E2M1: OCP MX 1.0, table 5."""
EXPERTS = "model.layers.{}.mlp.experts."
PROJECTIONS = ("gate_up_proj", "down_proj")


def test_every_number_with_every_scale_is_that_of_the_specification() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    # One block for each scale but NaN; 16 numbers twice. Those above the largest number of bf16 are refused below.
    blocks = (codes[0::2] | codes[1::2] << 4).repeat(2).expand(253, 16)
    scales = torch.arange(253, dtype=torch.uint8)
    numbers = dequantize(blocks[:, None], scales[:, None], "w")
    assert numbers.dtype == torch.bfloat16 and numbers.shape == (253, 32)
    for scale in range(253):
        positive = [math.ldexp(number, scale - 127) for number in SPECIFIED]
        assert numbers[scale].tolist() == (positive + [-number for number in positive]) * 2, scale


@pytest.mark.parametrize("scale", [254, 255])
def test_numbers_that_bf16_cannot_hold_and_nan_are_refused_by_name(scale: int) -> None:
    blocks, scales = torch.full((1, 2, 16), 0x77, dtype=torch.uint8), torch.tensor([[127, scale]], dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=r"MXFP4 in experts.down_proj_blocks"):
        dequantize(blocks, scales, "experts.down_proj_blocks")


def test_random_blocks_are_what_transformers_makes_of_them() -> None:
    blocks, scales = random_blocks((3, 10, 4), seed=0)
    ours = dequantize(blocks, scales, "w")
    assert torch.equal(ours.transpose(1, 2), convert_moe_packed_tensors(blocks, scales))


def random_blocks(shape: tuple[int, int, int], seed: int) -> tuple[Tensor, Tensor]:
    """Blocks ``[experts, rows, blocks, 16]`` of numbers of usual size, and their scales."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator).to(torch.uint8)
    return blocks, torch.randint(121, 125, shape, generator=generator).to(torch.uint8)


def published_folder(folder: Path) -> dict[str, Tensor]:
    """A tiny model as openai/gpt-oss-20b is published: keys of config.json, MXFP4, two files, the scales of one layer
    in the other file. Returns what is stored."""
    model = hf_reference(False, family="gpt_oss")
    model.save_pretrained(folder)
    stored = {name: w.bfloat16() for name, w in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    for layer in range(4):
        for i, projection in enumerate(PROJECTIONS):
            name = EXPERTS.format(layer) + projection
            experts, columns, rows = stored.pop(name).shape
            blocks, scales = random_blocks((experts, rows, columns // 32), seed=2 * layer + i)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    first = {n: w for n, w in stored.items() if "layers.0" in n and not n.endswith("_scales")}
    files = {"model-00001-of-00002.safetensors": first}
    files["model-00002-of-00002.safetensors"] = {n: w for n, w in stored.items() if n not in first}
    for file, weights in files.items():
        save_file(weights, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, weights in files.items() for name in weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = json.loads((folder / "config.json").read_text())
    rope = dict(config.pop("rope_parameters"))
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "experts_per_token": 2}
    config |= {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (folder / "config.json").write_text(json.dumps(config))
    return stored


def loaded(folder: Path, **options: Any) -> Any:
    """The model of a folder in bf16, as transformers reads it."""
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True, **options
    )
    assert not any(report.values()), report
    return model


def test_a_published_folder_is_what_transformers_reads_and_is_exported_as_bf16(tmp_path: Path) -> None:
    published_folder(tmp_path / "in")
    theirs = loaded(tmp_path / "in", quantization_config=Mxfp4Config(dequantize=True))
    config = read_hf_config(tmp_path / "in")
    assert not hasattr(config, "quantization_config")
    ours = build_hf_model(config, torch.bfloat16)
    copy_into_model(ours, stream_folder(tmp_path / "in", config))
    expected = dict(stream_model(theirs))
    for name, weight in stream_model(ours):
        assert torch.equal(weight, expected[name].bfloat16()), name
    save_hf_folder(tmp_path / "out", tmp_path / "in", stream_model(ours), torch.bfloat16)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in written and written["dtype"] == "bfloat16"
    names = set(load_file(tmp_path / "out" / "model.safetensors"))
    assert {EXPERTS.format(3) + name for p in PROJECTIONS for name in (p, f"{p}_bias")} <= names
    assert not any("_blocks" in name or ".experts.0." in name for name in names)
    again, tokens = loaded(tmp_path / "out"), samples()[3].tokens[None]
    assert torch.equal(again(tokens).logits, ours(tokens).logits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("without_scales", "Expected .*gate_up_proj_scales beside"),
        ("without_blocks", "Expected .*gate_up_proj_blocks beside"),
        ("other_scales", r"in MXFP4: blocks .* got \(8, 192, 2, 16\)"),
        ("other_dtype", r"Expected .*gate_up_proj_blocks in MXFP4: .* in BF16"),
        ("nan", "numbers in MXFP4 in model.layers.3.mlp.experts.gate_up_proj_blocks"),
    ],
)
def test_incomplete_or_wrong_blocks_are_refused_by_name(change: str, message: str, tmp_path: Path) -> None:
    stored = published_folder(tmp_path)
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    blocks, scales = (EXPERTS.format(3) + f"gate_up_proj_{kind}" for kind in ("blocks", "scales"))
    if change == "without_scales":
        del stored[scales]
    elif change == "without_blocks":
        del stored[blocks]
    elif change == "other_scales":
        stored[scales] = stored[scales][:, :, :1].contiguous()
    elif change == "other_dtype":
        stored[scales] = stored[scales].bfloat16()
    else:
        stored[scales][7, 1, 0] = 255
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        list(FolderWeights(tmp_path).stream(tied=False))
