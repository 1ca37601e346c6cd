"""End tokens of config.json, generation_config.json and the tokenizer, for every engine alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, GenerationConfig

from megatron_dppo.engines.local.engine import LocalEngine
from megatron_dppo.engines.server_engine import build_contract
from megatron_dppo.errors import CheckpointError
from megatron_dppo.hf.folder import build_hf_model, end_tokens, read_hf_config, stream_model
from megatron_dppo.types import Prompt, SamplingParams
from tests.silent_tokenizer import SilentTokenizer

TOKENIZER = SilentTokenizer()
VOCABULARY = 30


def folder_of(folder: Path, config_tokens: Any, generation: Any) -> Path:
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8)
    config = AutoConfig.for_model("qwen3", vocab_size=VOCABULARY, num_key_value_heads=1, **sizes)
    config.eos_token_id = config_tokens
    config.save_pretrained(folder)
    if generation is not None:
        text = generation if isinstance(generation, str) else json.dumps(generation)
        (folder / "generation_config.json").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("config_tokens", "generation_tokens", "expected"),
    [
        (2, None, {1, 2}),
        (2, [2, 17], {1, 2, 17}),
        (2, 17, {1, 2, 17}),
        ([3, 4], [4, 5], {1, 3, 4, 5}),
        (None, [7], {1, 7}),
        (None, None, {1}),
    ],
)
def test_both_files_and_the_tokenizer_count(
    tmp_path: Path, config_tokens: Any, generation_tokens: Any, expected: set[int]
) -> None:
    folder = folder_of(tmp_path, config_tokens, {"eos_token_id": generation_tokens})
    assert GenerationConfig.from_pretrained(folder).eos_token_id == generation_tokens
    assert end_tokens(read_hf_config(folder), TOKENIZER) == expected
    assert set(build_contract(read_hf_config(folder), TOKENIZER).end_tokens) == expected


def test_the_local_engine_ends_at_a_token_that_only_generation_config_names(tmp_path: Path) -> None:
    ends = list(range(2, VOCABULARY, 3))
    hf_config = read_hf_config(folder_of(tmp_path, 1, {"eos_token_id": ends}))
    engine = LocalEngine(hf_config, TOKENIZER, dtype=torch.float32, device=torch.device("cpu"))
    engine.update_weights(stream_model(build_hf_model(hf_config, torch.float32, seed=0)), 0)
    prompts = [Prompt(prompt_id=str(i), token_ids=(3, 4, i), text="", label="") for i in range(16)]
    responses = engine.generate(prompts, SamplingParams(max_new_tokens=40, seed=5))
    tokens = [[int(token) for token in response.token_ids] for response in responses]
    assert sum(row[-1] in ends for row in tokens) > 12
    assert not [row for row in tokens if set(row[:-1]) & {1, *ends}]


@pytest.mark.parametrize(
    "generation",
    [{"eos_token_id": bad} for bad in ("2", -1, VOCABULARY, 2.0, True, [2, [3]], {"a": 1}, [None])]
    + ["", "[]", "{", "[" * 100_000, json.dumps({"eos_token_id": 1e400})],
)
def test_what_is_no_token_is_refused_with_its_file(tmp_path: Path, generation: Any) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config.json (has eos_token_id|cannot)"):
        read_hf_config(folder_of(tmp_path, 2, generation))
