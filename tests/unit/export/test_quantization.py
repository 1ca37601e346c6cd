"""Quantised folders: read back by transformers, tensor for tensor those of nvidia-modelopt and compressed-tensors."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_dppo.errors import CheckpointError
from megatron_dppo.export.hf_folder import save_hf_folder
from megatron_dppo.export.quantization import (
    Quantization,
    find_quantized_names,
    fp8_blocks,
    int4_groups,
    quantize_stream,
)
from megatron_dppo.hf.folder import build_hf_model, stream_model, weight_shapes
from megatron_dppo.mcore.shims import apply_shims
from megatron_dppo.parallel.platform import Platform
from megatron_dppo_convert.command import quantized_format
from megatron_dppo_convert.quantized_folder import quantize_folder
from tests.distributed.families import TINY, family_config

ROUTED = re.compile(r".*experts\.\d+\.\w+\.weight")


def qwen3_moe(**changes: Any) -> Any:
    """Two layers, the first one dense. transformers cannot read a row of blocks whose last one is smaller."""
    from transformers import Qwen3MoeConfig

    sizes: dict[str, Any] = dict(
        vocab_size=70,
        hidden_size=256,
        intermediate_size=384,
        moe_intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=[0],
        tie_word_embeddings=False,
    )
    return Qwen3MoeConfig(**sizes | changes)


def written(folder: Path, how: Quantization, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """A quantised model in ``folder / "out"``; returns its weights before, rounded to ``dtype``."""
    config = qwen3_moe()
    config.save_pretrained(folder / "source")
    weights = {name: w.to(dtype) for name, w in stream_model(build_hf_model(config, torch.float32, seed=0))}
    save_hf_folder(folder / "out", folder / "source", weights.items(), dtype, quantization=how, max_shard_bytes=200_000)
    return weights


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: w for file in folder.glob("*.safetensors") for name, w in load_file(file).items()}


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_transformers_reads_every_weight_back_within_half_a_step(form: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    before = written(tmp_path, Quantization(form))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16, **dequantizing(form))
    after = dict(stream_model(model))
    assert after.keys() == before.keys()
    rounded = {name for name in before if not torch.equal(before[name], after[name])}
    linear = {name for name in before if name.endswith("_proj.weight")}
    assert rounded == (linear if form == "fp8" else {name for name in linear if ROUTED.fullmatch(name)})
    assert rounded
    for name in rounded:
        weight, error = before[name].float(), (before[name].float() - after[name].float()).abs()
        in_bf16 = weight.abs() * 2**-8  # what it was read back in
        assert bool((error <= half_step(weight, form) + in_bf16).all()), name


def half_step(weight: Tensor, form: str) -> Tensor:
    """Return half a step of each number by the definition of the format, written with loops over blocks."""
    rows, columns = (128, 128) if form == "fp8" else (1, 32)
    result = torch.zeros_like(weight)
    for top in range(0, weight.shape[0], rows):
        for left in range(0, weight.shape[1], columns):
            part = weight[top : top + rows, left : left + columns]
            largest = part.abs().max()
            if form == "int4":
                step = (largest / 7).expand(part.shape) * 1.01  # the scale itself is in bf16
            else:
                unit = largest / 448
                # E4M3: 3 bits behind the first one; below 2^-6 the steps get no finer.
                exponent = (part.abs() / unit).log2().floor().clamp(min=-6)
                step = 2.0 ** (exponent - 3) * unit
            result[top : top + rows, left : left + columns] = step / 2
    return result * (1 + 1e-3)


def dequantizing(form: str) -> dict[str, Any]:
    if form == "fp8":
        return {}  # transformers does it by itself on a CPU
    from transformers import CompressedTensorsConfig

    return {"quantization_config": CompressedTensorsConfig(run_compressed=False)}


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_a_model_that_joins_its_experts_is_refused(form: Any, tmp_path: Path) -> None:
    config = family_config("gpt_oss")
    config.save_pretrained(tmp_path / "source")
    weights = stream_model(build_hf_model(config, torch.float32))
    with pytest.raises(CheckpointError, match=f"each expert.*{form}.*without"):
        save_hf_folder(tmp_path / "out", tmp_path / "source", weights, None, quantization=Quantization(form))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", [name for name in TINY if name != "gpt_oss"])
def test_every_linear_layer_of_a_family_is_quantized_and_no_other_weight(family: str) -> None:
    config = family_config(family)
    # By what the layers are, not by their names.
    with torch.device("meta"):
        model = build_hf_model(config, torch.float32)
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)} - {"lm_head"}
    small = {name for name in linear if re.search(r"shared_expert_gate$|in_proj_(ba|b|a)$", name)}
    shapes = weight_shapes(config)
    experts = {name for name in shapes if ".experts." in name}
    large = {f"{name}.weight" for name in linear - small}
    for form, expected in (("fp8", large | experts), ("int4", experts)):
        assert {name for name in shapes if Quantization(form).includes(name)} == expected  # type: ignore[arg-type]
    routers = {name.removesuffix(".weight") for name in shapes if re.search(r"(mlp|moe)\.gate\.weight", name)}
    unrounded = {"lm_head", *small, *routers}
    listed = set(Quantization("fp8").config(shapes)["modules_to_not_convert"])
    assert {name for name in listed if not name.endswith("conv1d")} == unrounded


def test_fp8_is_that_of_modelopt_bit_for_bit() -> None:
    apply_shims(Platform.detect(0))  # before modelopt imports Megatron
    tensor = pytest.importorskip("modelopt.torch.quantization.qtensor").FP8QTensor
    torch.manual_seed(0)
    for shape in ((256, 384), (130, 100)):
        weight = torch.randn(shape).to(torch.bfloat16)
        theirs, scales = tensor.quantize(weight.float(), block_sizes={-1: 128, -2: 128})
        numbers, scale = fp8_blocks(weight)
        assert torch.equal(scale, scales)
        assert torch.equal(numbers.view(torch.uint8), theirs._quantized_data.view(torch.uint8))


def test_int4_is_that_of_modelopt_bit_for_bit_and_packed_as_compressed_tensors_does() -> None:
    apply_shims(Platform.detect(0))  # before modelopt imports Megatron
    tensor = pytest.importorskip("modelopt.torch.quantization.qtensor").INT4QTensor
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    torch.manual_seed(0)
    weight = torch.randn(24, 96)  # in fp32, so that the scales are not rounded
    theirs, scales = tensor.quantize(weight, 32)
    numbers, scale = int4_groups(weight)
    bytes_ = theirs._quantized_data
    unpacked = torch.stack([bytes_ >> 4, bytes_ & 15], -1).reshape(weight.shape).to(torch.int8) - 8
    assert torch.equal(numbers, unpacked)
    torch.testing.assert_close(1 / scale.flatten(), scales.flatten())
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    made = dict(quantize_stream([(name, weight)], Quantization("int4")))
    assert torch.equal(made[f"{name}_packed"], helpers.pack_to_int32(numbers, 4))
    assert made[f"{name}_shape"].tolist() == [24, 96] and made.keys() == {
        f"{name}_{p}" for p in ("packed", "scale", "shape")
    }


def test_a_folder_declares_its_quantization(tmp_path: Path) -> None:
    before = written(tmp_path, Quantization("fp8"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["weight_block_size"]) == ("fp8", [128, 128])
    assert config["modules_to_not_convert"] == ["lm_head", "model.layers.1.mlp.gate"]
    result = stored(tmp_path / "out")
    scales = {name: w for name, w in result.items() if name.endswith("_scale_inv")}
    assert {w.dtype for w in scales.values()} == {torch.float32}
    assert scales["model.layers.0.mlp.down_proj.weight_scale_inv"].shape == (2, 3)
    assert result["model.layers.0.mlp.down_proj.weight"].dtype == torch.float8_e4m3fn
    assert result["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16
    names = find_quantized_names(result, "fp8")
    assert names == {name for name in before if name.endswith("_proj.weight")}
    # A folder that leaves something out is published as it is.
    part = Quantization("fp8", frozenset({"model.layers.1.self_attn.o_proj.weight"}))
    second = dict(quantize_stream(before.items(), part))
    assert [name for name in second if name.endswith("_scale_inv")] == [
        "model.layers.1.self_attn.o_proj.weight_scale_inv"
    ]


def test_zeros_and_the_smallest_numbers_stay_finite() -> None:
    weight = torch.zeros(256, 128)
    weight[200, 5] = 1e-44  # subnormal in fp32, as its scale would be
    numbers, scale = fp8_blocks(weight)
    assert scale[0, 0] == 1 and bool(torch.isfinite(numbers.float()).all())
    numbers, scale = int4_groups(torch.zeros(4, 32))
    assert not numbers.any() and bool((scale == 1).all())


def test_fp8_of_tiny_weights_is_finite_and_within_half_a_step_of_its_scale() -> None:
    """Below 448 times the smallest normal fp32 number the scale is subnormal, and rounded by up to half of itself."""
    largest = torch.cat([torch.arange(225, 2000, 7) * 2.0**-149, 2.0 ** torch.arange(-130.0, -100.0)])
    for value in largest.tolist():
        weight = torch.tensor([[value, -value, value / 2, 0.0]])
        numbers, scale = fp8_blocks(weight)
        result = numbers.double() * scale.double()
        assert bool(result.isfinite().all()), value
        # Three bits of mantissa are a relative error of 1/16; beside it the rounding of the scale, and its clamp.
        error = (result - weight.double()).abs() / value
        assert float(error.max()) < (1 / 16 if float(scale) > 2.0**-126 else 0.5), value


@pytest.mark.parametrize(
    ("form", "weight", "problem"),
    [
        ("fp8", torch.full((4, 4), torch.nan), "not finite"),
        ("int4", torch.full((4, 32), torch.inf), "not finite"),
        ("int4", torch.ones(4, 40), "40 columns.*multiple"),
        ("fp8", torch.ones(2, 4, 4), r"shape \(2, 4, 4\)"),
    ],
)
def test_weights_that_a_format_cannot_hold_are_refused_by_name(form: Any, weight: Tensor, problem: str) -> None:
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    with pytest.raises(CheckpointError, match=f"{name} .*{problem}"):
        list(quantize_stream([(name, weight)], Quantization(form)))


def test_a_model_without_routed_experts_has_nothing_for_int4(tmp_path: Path) -> None:
    config = qwen3_moe(mlp_only_layers=[0, 1])
    config.save_pretrained(tmp_path / "dense")
    weights = stream_model(build_hf_model(config, torch.float32, seed=0))
    save_hf_folder(tmp_path / "dense", tmp_path / "dense", weights, torch.float32)
    with pytest.raises(CheckpointError, match=r"no routed experts.*--format fp8"):
        quantize_folder(tmp_path / "dense", tmp_path / "out", "int4", torch.bfloat16)
    assert not (tmp_path / "out").exists()


def test_a_removed_format_names_its_replacement() -> None:
    assert [quantized_format(name) for name in ("fp8", "int4")] == ["fp8", "int4"]
    with pytest.raises(argparse.ArgumentTypeError, match=r"int4_awq was removed.*hf_ptq.py --qformat int4_awq"):
        quantized_format("int4_awq")
    with pytest.raises(argparse.ArgumentTypeError, match="expected fp8 or int4, got 'int8'"):
        quantized_format("int8")
