"""The sizes of models that a plan can be made for without their folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_dppo.config.lora import LoraConfig
from megatron_dppo.errors import CheckpointError
from megatron_dppo.hf import adapter_sizes, read_hf_config, weight_shapes

# https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json
_QWEN3_30B_A3B: Mapping[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
# https://huggingface.co/Qwen/Qwen3-8B/blob/main/config.json
_QWEN3_8B: Mapping[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
_BASE: Mapping[str, Any] = {"max_position_embeddings": 32768}
"""What the base models differ in, of what a plan reads."""
KNOWN: Mapping[str, Mapping[str, Any]] = {
    "Qwen3-30B-A3B": _QWEN3_30B_A3B,
    "Qwen3-30B-A3B-Base": {**_QWEN3_30B_A3B, **_BASE},
    "Qwen3-8B": _QWEN3_8B,
    "Qwen3-8B-Base": {**_QWEN3_8B, **_BASE},
}
"""By the last part of ``model.path``: what their config.json says."""


def model_config(path: str) -> tuple[Any, str | None]:
    """The transformers config of ``model.path``, and a note if it comes from ``KNOWN``.

    Raises:
        CheckpointError: no such folder, and no known model of that name.
    """
    known = KNOWN.get(Path(path).name)
    if known is None or (Path(path) / "config.json").is_file():
        return read_hf_config(path), None
    from transformers import AutoConfig

    values = dict(known)
    try:
        config = AutoConfig.for_model(values.pop("model_type"), **values)
    except ValueError as error:
        raise CheckpointError(f"transformers does not know the architecture of {path}: {error}") from error
    return config, f"{path} is not here: its sizes are those that the package knows of that name"


def parameter_counts(hf_config: Any) -> tuple[int, int]:
    """All weights of the model, tied ones once; and those of its routed experts."""
    counts = {name: math.prod(shape) for name, shape in weight_shapes(hf_config).items()}
    return sum(counts.values()), _of_experts(counts)


def adapter_counts(hf_config: Any, lora: LoraConfig) -> tuple[int, int]:
    """The numbers in all adapters; and in those of routed experts."""
    sizes = adapter_sizes(weight_shapes(hf_config), lora)
    return sum(sizes.values()), _of_experts(sizes)


def _of_experts(counts: Mapping[str, int]) -> int:
    return sum(count for name, count in counts.items() if ".experts." in name)
