"""Folders as Qwen publishes them: nested config.json, prefixed names, fused experts, vision and MTP weights beside."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from megatron_dppo.errors import CheckpointError, ConfigError
from megatron_dppo.export.hf_folder import save_hf_folder
from megatron_dppo.hf.config_keys import check_config_keys
from megatron_dppo.hf.families import get_family
from megatron_dppo.hf.folder import (
    build_hf_model,
    check_weights_fit,
    copy_into_model,
    model_shape,
    read_hf_config,
    stream_folder,
    stream_model,
)
from megatron_dppo.hf.weight_files import FolderWeights
from megatron_dppo.setup.inputs import check_model, check_served_keys
from tests.distributed.families import family_config
from tests.distributed.key_variations import variations
from tests.unit.configs import config as run_config

VISION = dict(
    depth=1, hidden_size=16, intermediate_size=24, num_heads=2, out_hidden_size=64, num_position_embeddings=16
)


def published(folder: Path, seed: int = 0) -> tuple[Any, dict[str, Tensor]]:
    """A tiny model with a vision part as transformers makes it, and its tensors by the names of released folders."""
    text = family_config("qwen3_5_moe_text").to_dict()
    config = AutoConfig.for_model("qwen3_5_moe", text_config=text, vision_config=VISION)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    # The names in memory are those of the released files: experts fused, the language model under its prefix.
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
    tensors["mtp.fc.weight"] = torch.randn(64, 128, generator=generator)
    tensors["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.randn(8, 96, 64, generator=generator)
    folder.mkdir()
    model.config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model, tensors


def test_a_published_folder_is_read_as_its_language_model(tmp_path: Path) -> None:
    model, tensors = published(tmp_path / "in")
    assert {"model.language_model.layers.0.mlp.experts.gate_up_proj", "lm_head.weight"} <= tensors.keys()
    hf_config = read_hf_config(tmp_path / "in")
    assert hf_config.model_type == "qwen3_5_moe_text" and model_shape(hf_config).num_experts == 8
    check_weights_fit(tmp_path / "in", hf_config)
    language_model = build_hf_model(hf_config, torch.float32)
    copy_into_model(language_model, stream_folder(tmp_path / "in", hf_config))
    tokens = torch.tensor([[5, 9, 30, 2, 77, 41]])
    with torch.no_grad():
        assert torch.equal(language_model(tokens).logits, model(input_ids=tokens).logits)
    note = FolderWeights(tmp_path / "in").note()
    assert note is not None and "23 weights that are not trained" in note


def test_an_exported_folder_has_the_published_names_and_what_is_not_trained(tmp_path: Path) -> None:
    _, tensors = published(tmp_path / "in")
    hf_config = read_hf_config(tmp_path / "in")
    trained = build_hf_model(hf_config, torch.float32, seed=7)
    save_hf_folder(tmp_path / "out", tmp_path / "in", stream_model(trained), torch.bfloat16, max_shard_bytes=200_000)
    written = {n: t for file in (tmp_path / "out").glob("*.safetensors") for n, t in load_file(file).items()}
    others = {name for name in tensors if name.startswith(("mtp.", "model.visual."))}
    assert len(others) > 5
    for name in others:  # bit for bit, in their own dtype
        assert written[name].dtype == torch.float32 and torch.equal(written[name], tensors[name]), name
    assert not {
        n for n in written if n.startswith("model.") and not n.startswith(("model.language_model.", "model.vis"))
    }
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["model_type"] == "qwen3_5_moe" and config["text_config"]["dtype"] == config["dtype"] == "bfloat16"
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == written.keys()
    # transformers reads it as the whole model, and so do we.
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).eval()
    second = build_hf_model(read_hf_config(tmp_path / "out"), torch.bfloat16)
    copy_into_model(second, stream_folder(tmp_path / "out", hf_config))
    tokens = torch.tensor([[5, 9, 30, 2, 77, 41]])
    decays = {name: tensor for name, tensor in written.items() if name.endswith("A_log")}
    for model in (loaded, trained.bfloat16()):  # transformers rounds them
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.data = decays[name if name in decays else name.replace("model.", "model.language_model.", 1)]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=tokens).logits, second(tokens).logits)
        assert torch.equal(second(tokens).logits, trained(tokens).logits)


def test_an_exported_folder_has_the_published_dtype_of_each_tensor(tmp_path: Path) -> None:
    _, tensors = published(tmp_path / "in")
    # As Qwen3.5-35B-A3B: decays and norms of linear attention in fp32, all else in bf16.
    stored = {
        name: tensor if name.endswith((".linear_attn.A_log", ".linear_attn.norm.weight")) else tensor.bfloat16()
        for name, tensor in tensors.items()
    }
    assert sum(tensor.dtype == torch.float32 for tensor in stored.values()) == 2 * 3
    save_file(stored, tmp_path / "in/model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "in/config.json").read_text())
    for dtype, expected in (("bfloat16", stored), ("float32", {})):
        config["text_config"]["dtype"] = dtype
        (tmp_path / "in/config.json").write_text(json.dumps(config))
        hf_config = read_hf_config(tmp_path / "in")
        trained = build_hf_model(hf_config, torch.bfloat16)
        copy_into_model(trained, stream_folder(tmp_path / "in", hf_config))
        save_hf_folder(tmp_path / "out", tmp_path / "in", stream_model(trained), torch.bfloat16)
        written = load_file(tmp_path / "out/model.safetensors")
        in_fp32 = {name for name, tensor in written.items() if tensor.dtype == torch.float32}
        if expected:
            assert in_fp32 == {name for name, tensor in stored.items() if tensor.dtype == torch.float32}
        else:  # a folder in fp32 is not written in fp32, except for decays
            assert {name.rpartition(".")[2] for name in in_fp32} == {"A_log"}
        for name in in_fp32:
            exact = stored[name] if name.endswith("A_log") else stored[name].bfloat16().float()
            assert torch.equal(written[name], exact), name


# Keys of text_config in the released Qwen3.5-35B-A3B that transformers does not have, or that tiny models leave out.
RELEASED: dict[str, Any] = dict(
    attn_output_gate=True,
    full_attention_interval=4,
    mamba_ssm_dtype="float32",
    mlp_only_layers=[],
    mtp_num_hidden_layers=1,
    mtp_use_dedicated_embeddings=False,
    partial_rotary_factor=0.25,
)
MROPE = {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}


def outcome(hf_config: Any) -> Any:
    """Return the shape, Megatron's fields and the rotary embedding; None if the model is refused."""
    try:
        shape = model_shape(hf_config)
        family = get_family(hf_config)
        return shape, family.fields(hf_config, shape), family.rope(hf_config)
    except CheckpointError:
        return None


def test_a_nested_config_is_the_one_of_the_language_model_whatever_its_keys(tmp_path: Path) -> None:
    plain = family_config("qwen3_5_moe_text")
    released = plain.to_dict() | RELEASED | {"rope_parameters": plain.rope_parameters | MROPE}
    changes = [keys for _, keys in variations(plain)]
    counts = {True: 0, False: 0}
    for keys in ({}, released, *changes):
        values = {"model_type": "qwen3_5_moe", "vision_config": VISION, "image_token_id": 3, "video_token_id": 4}
        values["text_config"] = plain.to_dict() | keys
        values["tie_word_embeddings"] = values["text_config"]["tie_word_embeddings"]
        (tmp_path / "config.json").write_text(json.dumps(values))
        try:
            flat = AutoConfig.for_model(**deepcopy({**plain.to_dict(), **keys}))
            check_config_keys(values["text_config"], flat, tmp_path)
            expected = outcome(flat)
        except Exception:  # transformers raises what its checks raise
            expected = None
        try:
            read = outcome(read_hf_config(tmp_path))
        except CheckpointError:
            read = None
        assert read == expected, keys
        counts[read is not None] += 1
    assert counts[True] > 50 and counts[False] > 30, counts
    assert outcome(AutoConfig.for_model(**released)) == outcome(plain)


def test_a_nested_config_that_is_tied_in_one_of_two_places_is_refused(tmp_path: Path) -> None:
    published(tmp_path / "in")
    values = json.loads((tmp_path / "in/config.json").read_text())
    values["tie_word_embeddings"] = not values["text_config"]["tie_word_embeddings"]
    (tmp_path / "in/config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"text_config.tie_word_embeddings = True .*got False"):
        read_hf_config(tmp_path / "in")


@pytest.mark.parametrize("kind", ["twice", "short", "missing"])
def test_fused_experts_that_do_not_fit_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    _, tensors = published(tmp_path / "in")
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    if kind == "twice":
        tensors["model.language_model.layers.0.mlp.experts.3.gate_proj.weight"] = torch.zeros(48, 64)
        message = "Expected model.layers.0.mlp.experts.3.gate_proj.weight once"
    elif kind == "short":
        tensors[name] = tensors[name][:7].contiguous()
        message = r"model.layers.0.mlp.experts.7.gate_proj.weight is missing"
    else:
        del tensors[name]
        message = r"model.layers.0.mlp.experts.0.gate_proj.weight is missing \(16 missing"
    save_file(tensors, tmp_path / "in/model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        check_weights_fit(tmp_path / "in", read_hf_config(tmp_path / "in"))


def test_a_quantized_published_folder_is_refused(tmp_path: Path) -> None:
    published(tmp_path / "in")
    config = json.loads((tmp_path / "in/config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "in/config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="quantization_config = 'fp8'"):
        model_shape(read_hf_config(tmp_path / "in"))


def test_servers_get_a_published_folder_by_disk_alone(tmp_path: Path) -> None:
    published(tmp_path / "in")
    hf_config = read_hf_config(tmp_path / "in")
    for engine, method in (("sglang", "distributed"), ("vllm", "ipc"), ("sglang", "disk"), ("local", "distributed")):
        config = run_config(
            model={"path": str(tmp_path / "in")}, rollout={"engine": engine, "weight_sync": {"method": method}}
        )
        messages = ""
        try:
            check_model(config, hf_config, model_shape(hf_config))
        except Exception as error:
            messages = str(error)
        is_refused = "Set it to 'disk'" in messages and repr(method) in messages
        assert is_refused == (engine != "local" and method != "disk"), messages


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        # By the config.json of the published models; MiniMax-M2 rotates half of a head, which has 24 dimensions here.
        ("deepseek_v3", {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}),
        ("glm4_moe_lite", {"topk_method": "noaux_tc", "first_k_dense_replace": 1}),
        ("minimax_m2", {"rotary_dim": 12, "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True}),
    ],
)
def test_an_exported_config_has_the_keys_that_servers_need_and_transformers_does_not_write(
    tmp_path: Path, family: str, keys: dict[str, Any]
) -> None:
    config = family_config(family)
    config.save_pretrained(tmp_path / "in")
    before = json.loads((tmp_path / "in/config.json").read_text())
    assert not keys.keys() <= before.keys()
    save_hf_folder(tmp_path / "out", tmp_path / "in", stream_model(build_hf_model(config, torch.float32)), None)
    after = json.loads((tmp_path / "out/config.json").read_text())
    assert {key: after[key] for key in keys} == keys and {key: after[key] for key in before} == before


def test_servers_that_compute_another_model_than_config_json_says_are_refused() -> None:
    hf_config = family_config("olmoe")
    with pytest.raises(ConfigError, match=r"rms_norm_eps = 1e-06; SGLang and vLLM .* with 1e-05"):
        check_served_keys("model", hf_config)
    hf_config.rms_norm_eps = 1e-5
    for accepted in (hf_config, family_config("minimax_m2"), family_config("qwen3_moe")):
        check_served_keys("model", accepted)
