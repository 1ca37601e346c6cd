"""Configuration of a dense Hugging Face folder's mixture of experts: exact, or refused."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dppo.errors import CheckpointError, ConfigError
from megatron_dppo.hf.families import FAMILIES
from megatron_dppo.hf.families.family import default_rope, head_dim, raise_unsupported
from megatron_dppo.hf.folder import model_shape

TARGETS: Mapping[str, str] = {**dict.fromkeys(("llama", "mistral", "qwen2"), "qwen2_moe"), "qwen3": "qwen3_moe"}
"""``model_type`` of a dense model -> that of its mixture of experts."""
SHARED_EXPERT_SIZE = 64
"""Width of the shared expert that Qwen2-MoE always has."""
_CARRIED_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps"),
    *("use_cache", "tie_word_embeddings", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id"),
)


@dataclass(frozen=True, kw_only=True)
class Upcycling:
    """Settings of one upcycling."""

    num_experts: int
    """Experts of every layer, at least 2."""
    top_k: int
    """Experts that each token passes through, from 1 to ``num_experts``."""
    noise: float
    """Standard deviation of the noise on each expert's weight, as a multiple of that weight's own."""
    seed: int = 0
    """Seed of the noise, the routers and the shared experts."""

    def __post_init__(self) -> None:
        if self.num_experts < 2:
            raise ConfigError(
                f"Expected --experts of at least 2, got {self.num_experts}. Fix: one expert is the dense model itself."
            )
        if not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(
                f"Expected --top-k from 1 to --experts ({self.num_experts}), got {self.top_k}. Fix: lower --top-k, or "
                "raise --experts."
            )
        if not (math.isfinite(self.noise) and self.noise >= 0):
            raise ConfigError(
                f"Expected --noise of 0 or a positive number, got {self.noise}. Fix: 0.02 is a usual value; 0 makes "
                "exact copies."
            )


def upcycled_config(dense_config: Any, settings: Upcycling, source: Path) -> dict[str, Any]:
    """Return the config.json of the mixture of experts."""
    file = source / "config.json"
    if dense_config.model_type not in TARGETS:
        raise CheckpointError(
            f"Expected a dense model with model_type {', '.join(TARGETS)} in {file}, got "
            f"{dense_config.model_type!r}. Fix: upcycle a dense model of one of these families."
        )
    model_type = TARGETS[dense_config.model_type]
    try:
        if model_shape(dense_config).window_layers:
            raise_unsupported(dense_config, "sliding_window", dense_config.sliding_window, "None")
        rope = default_rope(dense_config)
    except CheckpointError as error:
        raise CheckpointError(
            f"Expected a dense model that {model_type} computes exactly, got {source}: {error}. Fix: choose another "
            "dense model."
        ) from error
    config: dict[str, Any] = {
        "architectures": [FAMILIES[model_type].hf_class],
        "model_type": model_type,
        **{key: getattr(dense_config, key) for key in _CARRIED_KEYS},
        # transformers 5 reads rope_parameters, older versions rope_theta.
        "rope_theta": rope.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.theta},
        "use_sliding_window": False,
        "sliding_window": None,
        "num_experts": settings.num_experts,
        "num_experts_per_tok": settings.top_k,
        "moe_intermediate_size": dense_config.intermediate_size,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
        **_carried_dtype_and_tokenizer(source),
    }
    if model_type == "qwen3_moe":
        return config | {"attention_bias": False, "head_dim": head_dim(dense_config)}
    # SGLang and vLLM read no head_dim of a Qwen2-MoE.
    usual = dense_config.hidden_size // dense_config.num_attention_heads
    if head_dim(dense_config) != usual:
        raise CheckpointError(
            f"Expected head_dim = hidden_size / num_attention_heads = {usual} in {file}, got {head_dim(dense_config)}, "
            f"which servers do not read for {model_type}. Fix: choose a dense model with heads of that size."
        )
    # transformers, SGLang and Megatron leave the biases out with qkv_bias = false, but vLLM 0.32 always has them and
    # would leave them uninitialized. A dense model without biases therefore gets biases that are zero.
    return config | {"qkv_bias": True, "shared_expert_intermediate_size": SHARED_EXPERT_SIZE}


def _carried_dtype_and_tokenizer(source: Path) -> dict[str, Any]:
    """Return the keys of config.json that name the dtype and the tokenizer's class."""
    from transformers import AutoTokenizer

    dense = json.loads((source / "config.json").read_text())
    keys = {"dtype": dense.get("dtype", dense.get("torch_dtype")), "tokenizer_class": dense.get("tokenizer_class")}
    file = source / "tokenizer_config.json"
    try:
        declared = json.loads(file.read_text()) if file.is_file() else {}
        # Where nothing declares a class, transformers chooses one by model_type, which is another now.
        if (source / "tokenizer.json").is_file() and not (declared.get("tokenizer_class") or keys["tokenizer_class"]):
            tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
            keys["tokenizer_class"] = type(tokenizer).__name__
    except Exception as error:  # the tokenizers package raises plain Exceptions
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"Expected a tokenizer that transformers loads in {source}, got {what}. Fix: download it again."
        ) from error
    return {key: value for key, value in keys.items() if value is not None}
