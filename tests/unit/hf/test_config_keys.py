"""Keys of config.json: those of published models are accepted, unknown ones and contradictions are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_dppo.errors import CheckpointError
from megatron_dppo.hf.families import get_family
from megatron_dppo.hf.folder import build_hf_model, model_shape, read_hf_config
from tests.distributed.families import TINY, family_config

PUBLISHED: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data/published_configs.json").read_text())[
    "configs"
]


def read(folder: Path, values: dict[str, Any]) -> Any:
    """Read a config.json with these values as a run does."""
    (folder / "config.json").write_text(json.dumps(values))
    hf_config = read_hf_config(folder)
    shape = model_shape(hf_config)
    get_family(hf_config).fields(hf_config, shape)
    get_family(hf_config).rope(hf_config)
    return hf_config


def tiny(family: str) -> dict[str, Any]:
    """Return what transformers writes of a tiny model."""
    values: dict[str, Any] = json.loads(family_config(family).to_json_string(use_diff=False))
    return values


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_accepted(name: str, tmp_path: Path) -> None:
    values = PUBLISHED[name]
    language_model = values.get("text_config", values)
    hf_config = read(tmp_path, values)
    for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        assert getattr(hf_config, key) == language_model[key]


def test_the_page_names_each_model_whose_norms_of_latents_differ_from_transformers() -> None:
    page = (Path(__file__).parents[3] / "docs/models.md").read_text(encoding="utf-8")
    sentence, equal = re.search(r"it is 1e-5 in (.*?)\. .*DeepSeek-V3 and (.*?) have 1e-6", page, re.S).groups()  # type: ignore[union-attr]
    models = {name: values.get("text_config", values) for name, values in PUBLISHED.items()}
    latent = {name: float(values["rms_norm_eps"]) for name, values in models.items() if "kv_lora_rank" in values}
    assert len(latent) >= 4 and set(latent.values()) == {1e-5, 1e-6}
    for name, eps in latent.items():
        assert (name in sentence) == (eps == 1e-5)
        assert (name in f"DeepSeek-V3 {equal}") == (eps == 1e-6)


@pytest.mark.parametrize("name", ["deepseek_v3", "moonlight", "kimi_k2", "glm4_moe_lite"])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_norms_of_latents_in_the_local_engine_have_the_epsilon_of_config_json(name: str, eps: float) -> None:
    config = family_config(name)
    config.rms_norm_eps = eps
    ours = build_hf_model(config, torch.float32, seed=1)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    plain.load_state_dict(ours.state_dict())
    tokens = torch.arange(40)[None]
    assert torch.equal(ours(tokens).logits, plain(tokens).logits) == (eps == 1e-6)
    for module_name, module in plain.named_modules():
        if "_a_layernorm" in module_name:
            module.variance_epsilon = eps
    assert torch.equal(ours(tokens).logits, plain(tokens).logits)


@pytest.mark.parametrize("family", TINY)
def test_an_unknown_key_is_refused_by_name_unless_it_is_null(family: str, tmp_path: Path) -> None:
    values = tiny(family)
    # As in the folder of SmolLM2-135M-Instruct, which tools for other formats wrote.
    read(tmp_path, values | {"logit_scale": None, "unk_token_id": 0, "_model_name_or_path": "mine"})
    unknown = {"logit_scale": 0.5, "num_experts_per_token": 4}
    with pytest.raises(
        CheckpointError, match=r"config.json has keys .*: logit_scale = 0.5, num_experts_per_token = 4\."
    ):
        read(tmp_path, values | unknown)
    rope = {**values["rope_parameters"], "low_frequency_factor": 2.0}
    with pytest.raises(CheckpointError, match=r": rope_parameters.low_frequency_factor = 2.0\."):
        read(tmp_path, values | {"rope_parameters": rope})


def test_an_unknown_key_of_a_nested_language_model_is_refused(tmp_path: Path) -> None:
    values = PUBLISHED["Qwen3.5-35B-A3B"]
    with pytest.raises(CheckpointError, match=r"attn_logit_softcapping = 50\.0"):
        read(tmp_path, values | {"text_config": values["text_config"] | {"attn_logit_softcapping": 50.0}})


QWEN, COMBINED = {"rope_theta": 1e6}, {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("published", "change", "message"),
    [
        (
            "Qwen2.5-7B",
            {"rope_parameters": COMBINED},
            "rope_theta = 1000000.0 and rope_theta of the rotary.* = 10000.0",
        ),
        (
            "Qwen2.5-7B",
            {"rope_scaling": {"type": "yarn", "rope_type": "default"}},
            "type = 'yarn' and rope_type.*'default'",
        ),
        (
            "Qwen2.5-7B",
            {"rope_parameters": QWEN | {"rope_type": "default"}, "rope_scaling": {"type": "default"}},
            "rope_parameters = .* and rope_scaling = ",
        ),
        (
            "MiniMax-M2.5",
            {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_theta": 5e6, "partial_rotary_factor": 0.25}},
            "partial_rotary_factor = 0.5 and partial_rotary_factor.* = 0.25",
        ),
        ("DeepSeek-V3", {"num_local_experts": 8}, "n_routed_experts = 256 and num_local_experts = 8"),
        ("GLM-4.7-Flash", {"head_dim": 32}, "qk_rope_head_dim = 64 and head_dim = 32"),
        # Keys that servers read, with values that neither transformers nor Megatron computes.
        ("MiniMax-M2.5", {"rotary_dim": 32, "partial_rotary_factor": 0.5}, "rotary_dim = 32.*supported: 64"),
        ("Qwen3-Coder-480B-A35B-Instruct", {"shared_expert_intermediate_size": 8}, "size = 8.*supported: 0 or None"),
        ("Qwen3-Coder-480B-A35B-Instruct", {"use_qk_norm": False}, "use_qk_norm = False.*supported: True"),
        ("Qwen3-Coder-480B-A35B-Instruct", {"qkv_bias": True}, "qkv_bias = True.*supported: False"),
        ("Qwen2.5-7B", {"use_mrope": True}, "use_mrope = True.*supported: False"),
        (
            "Qwen2.5-7B",
            {"dual_chunk_attention_config": {"chunk_size": 8}},
            "dual_chunk_attention_config = {'chunk_size'",
        ),
        ("Llama-3.1-8B", {"is_causal": False}, "is_causal = False.*supported: True"),
        ("SmolLM2-135M", {"rope_interleaved": True}, "rope_interleaved = True.*supported: False"),
    ],
)
def test_keys_that_contradict_each_other_or_the_model_are_refused(
    published: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, PUBLISHED[published] | change)
    assert re.search(message, str(caught.value))
