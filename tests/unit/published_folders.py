"""Folders of published models: their config.json, names and shapes of weights, and a made-up tokenizer.

The weights are holes in files, so a folder of 800 GB takes a few megabytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_dppo.hf.families import get_family
from megatron_dppo.hf.families.fused_experts import match_expert
from megatron_dppo.hf.folder import read_hf_config, weight_shapes
from megatron_dppo.hf.mxfp4 import BLOCK
from megatron_dppo.hf.published_names import published_name
from megatron_dppo_plan.models import KNOWN_MODELS
from tests.engines.tiny import byte_tokenizer

PUBLISHED: Mapping[str, Any] = json.loads((Path(__file__).parents[1] / "data/published_configs.json").read_text())[
    "configs"
]
_SIBLINGS = {"Qwen3-8B": "Qwen3-32B", "Qwen3-8B-Base": "Qwen3-32B", "Qwen3-30B-A3B-Base": "Qwen3-30B-A3B"}
"""Models whose config.json could not be copied: the published one of a sibling has their keys, the plan their sizes."""
_FILE_BYTES = 4_000_000_000
_BYTES = {"BF16": 2, "U8": 1}
# ChatML with Hermes's calls: the form of most models of the examples.
_TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>{"name": <function-name>}</tool_call><|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- endif %}"""


def published_config(name: str) -> dict[str, Any]:
    """Return the content of a model's published config.json.

    Raises:
        KeyError: There is no copy of it. Add it to tests/data/published_configs.json.
    """
    if name in PUBLISHED:
        return dict(PUBLISHED[name])
    sizes = {key: value for key, value in KNOWN_MODELS[name].items() if key != "rope_parameters"}
    return {**PUBLISHED[_SIBLINGS[name]], **sizes}


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of bytes with the template of ChatML."""
    tokenizer = byte_tokenizer(["<pad>", "<|im_start|>", "<|im_end|>"])
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<pad>"
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)


def write_published_folder(folder: Path, name: str) -> None:
    """Write a published model: its config.json as it is, weights in the published names, a made-up tokenizer."""
    folder.mkdir(parents=True)
    values = published_config(name)
    (folder / "config.json").write_text(json.dumps(values))
    write_tokenizer(folder)
    write_holes(folder, published_weights(read_hf_config(folder), is_nested="text_config" in values))


def published_weights(hf_config: Any, *, is_nested: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of each stored tensor. Nested models and gpt-oss join the experts of a layer."""
    shapes = weight_shapes(hf_config)
    interleaved = get_family(hf_config).fused_experts.is_interleaved
    if not is_nested and not interleaved:
        return {name: ("BF16", shape) for name, shape in shapes.items()}
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    num_experts = 1 + max(match[2] for match in map(match_expert, shapes) if match is not None)
    for name, shape in shapes.items():
        match = match_expert(name)
        if match is None:
            tensors[published_name(name) if is_nested else name] = ("BF16", shape)
            continue
        module, kind, _, _ = match
        key = f"{module}.{kind}"
        rows = shape[0] * (2 if kind.startswith("gate_up") else 1)
        if not interleaved:
            tensors[published_name(key)] = ("BF16", (num_experts, rows, *shape[1:]))
        elif kind.endswith("_bias"):
            tensors[key] = ("BF16", (num_experts, rows))
        else:
            tensors[f"{key}_blocks"] = ("U8", (num_experts, rows, shape[1] // BLOCK, BLOCK // 2))
            tensors[f"{key}_scales"] = ("U8", (num_experts, rows, shape[1] // BLOCK))
    return tensors


def write_holes(folder: Path, tensors: Mapping[str, tuple[str, Iterable[int]]]) -> None:
    """Write safetensors files of about 4 GB and their index. The tensors are holes."""
    sizes = {name: _BYTES[dtype] * math.prod(shape) for name, (dtype, shape) in tensors.items()}
    count = 1 + sum(sizes.values()) // _FILE_BYTES
    weight_map = {}
    for number in range(count):
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        header, end = {}, 0
        for name in list(tensors)[number::count]:
            dtype, shape = tensors[name]
            begin, end = end, end + sizes[name]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
            weight_map[name] = file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as target:
            target.write(struct.pack("<Q", len(text)) + text)
            target.truncate(8 + len(text) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
