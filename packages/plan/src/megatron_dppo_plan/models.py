"""Sizes of well-known models, for plans without their folder, and sample rows for a rehearsal."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.config.layout import Layout
from megatron_dppo.config.model import LoraConfig
from megatron_dppo.config.schema import Config
from megatron_dppo.data.training_samples import RowShape, pack, to_training_sample
from megatron_dppo.errors import CheckpointError
from megatron_dppo.hf.families import FAMILIES
from megatron_dppo.hf.folder import adapter_sizes, read_hf_config, routing_shape, weight_shapes
from megatron_dppo.losses import BatchTotals
from megatron_dppo.policy.update import add_token_weights
from megatron_dppo.types import MicroBatch, RoutingShape, SamplingMask, TrainingSample, with_weights
from megatron_dppo.types.token_columns import columns_on_request
from megatron_dppo_plan.arithmetic import assumed_mask_size, longest_sample

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
_BASE_MODEL_FIELDS: Mapping[str, Any] = {"max_position_embeddings": 32768}
"""Fields in which the base models differ."""
KNOWN_MODELS: Mapping[str, Mapping[str, Any]] = {
    "Qwen3-30B-A3B": _QWEN3_30B_A3B,
    "Qwen3-30B-A3B-Base": {**_QWEN3_30B_A3B, **_BASE_MODEL_FIELDS},
    "Qwen3-8B": _QWEN3_8B,
    "Qwen3-8B-Base": {**_QWEN3_8B, **_BASE_MODEL_FIELDS},
}
"""Content of config.json by the last part of ``model.path``."""


def load_model_config(path: str) -> tuple[Any, str | None]:
    """Return the transformers config of ``model.path``, and a note if it is a known or a published model."""
    # Families have what transformers has other values of.
    published = {
        model.name: {"model_type": family.model_type, **model.keys}
        for family in FAMILIES.values()
        for model in family.published
    }
    known = {**published, **KNOWN_MODELS}.get(Path(path).name)
    if known is None or (Path(path) / "config.json").is_file():
        return read_hf_config(path), None
    from transformers import AutoConfig

    values = dict(known)
    try:
        config = AutoConfig.for_model(values.pop("model_type"), **values)
    except ValueError as error:
        raise CheckpointError(
            f"transformers does not support the architecture of {path}: {error}. Fix: upgrade transformers"
        ) from error
    return config, f"note     {path} does not exist on this machine: using the sizes of the known model of that name"


def count_parameters(hf_config: Any) -> tuple[int, int]:
    """Return the parameters of the model, counting tied weights once, and those of its routed experts."""
    counts = {name: math.prod(shape) for name, shape in weight_shapes(hf_config).items()}
    return sum(counts.values()), _sum_expert_parameters(counts)


def count_adapter_parameters(hf_config: Any, lora: LoraConfig) -> tuple[int, int]:
    """Return the parameters of all adapters, and of those of routed experts."""
    sizes = adapter_sizes(weight_shapes(hf_config), lora)
    return sum(sizes.values()), _sum_expert_parameters(sizes)


def _sum_expert_parameters(counts: Mapping[str, int]) -> int:
    return sum(count for name, count in counts.items() if ".experts." in name)


def sample_rows(config: Config, hf_config: Any, layout: Layout, count: int) -> Sequence[MicroBatch]:
    """Return ``count`` full rows of one update, of sequences as long as the configuration allows.

    Prompts have one token, so every position has a loss and a gradient: the most work and memory.
    """
    shape = RowShape(row_multiple=layout.row_multiple, sequence_multiple=layout.sequence_multiple)
    routing = routing_shape(hf_config, weights=config.train.router_replay_weights)
    longest = longest_sample(config)
    tokens = max(config.train.micro_batch_tokens, longest)
    lengths = [min(tokens - start, longest) for start in range(0, tokens, longest)]
    row = pack([_sample_sequence(length, config, routing, hf_config.vocab_size) for length in lengths], shape)
    sequences = int((row.loss_mask & (row.position_ids == 0)).sum())
    totals = BatchTotals(num_tokens=count * int(row.loss_mask.sum()), num_sequences=count * sequences)
    return [add_token_weights(row, totals, config.loss)] * count


def _sample_sequence(length: int, config: Config, routing: RoutingShape | None, vocab_size: int) -> TrainingSample:
    """Return a sequence of ``length`` input tokens with every column of the run."""
    topk = None
    if config.loss.is_topk:
        ids = torch.arange(config.loss.topk + 1, dtype=torch.int32).expand(length, -1).clone()
        # The label is among the Top-K, so its own slot is unused.
        ids[:, -1] = -1
        topk = ids, torch.full(ids.shape, -3.0)
    routes = None
    if routing is not None and config.train.router_replay != "off":
        # Balanced routes: every expert gets equally many tokens, in each part of the row.
        experts = torch.arange(length * routing.topk) % routing.num_experts
        layer_routes = experts.to(routing.dtype).view(length, 1, routing.topk)
        if routing.weights:
            layer_routes = with_weights(layer_routes, torch.full(layer_routes.shape, 1 / routing.topk))
        routes = layer_routes.expand(-1, routing.num_layers, -1).contiguous()
    sampling_mask = None
    if mask_size := assumed_mask_size(config, vocab_size):
        # Distinct ids, among them the label 1.
        ids = torch.arange(1, mask_size + 1, dtype=torch.int32) % vocab_size
        sampling_mask = SamplingMask(ids.repeat(length), torch.full((length,), mask_size, dtype=torch.int32))
    sample = to_training_sample([1], [1] * length, [-0.5] * length, 1.0, topk, routes, sampling_mask=sampling_mask)
    logprobs = {name: torch.full((length,), -0.5) for name in ("recomputed_logprobs", "reference_logprobs")}
    logprobs["ages"] = torch.ones(length)
    required = config.loss.required_inputs | ({"reference_logprobs"} if config.needs_reference else set())
    logprobs |= {str(column.name): column.new(length) for column in columns_on_request().values()}
    changes: dict[str, Any] = {name: column for name, column in logprobs.items() if name in required}
    return replace(sample, **changes)
