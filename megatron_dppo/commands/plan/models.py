"""Sizes of models that a plan can be made for without their folder, and sample rows for a rehearsal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.commands.plan.arithmetic import kept_ids
from megatron_dppo.config.layout import Layout
from megatron_dppo.config.model import LoraConfig
from megatron_dppo.config.schema import Config
from megatron_dppo.data.training_samples import RowShape, pack, to_training_sample
from megatron_dppo.errors import CheckpointError
from megatron_dppo.hf.folder import adapter_sizes, read_hf_config, routing_shape, weight_shapes
from megatron_dppo.losses import BatchTotals
from megatron_dppo.policy.update import add_token_weights
from megatron_dppo.types import MicroBatch, RoutingShape, SamplingMask, TrainingSample, with_weights

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


def _full_row(config: Config, shape: RowShape, routing: RoutingShape | None, vocab_size: int) -> MicroBatch:
    """A row of ``train.micro_batch_tokens``, of sequences as long as the configuration allows.

    Every position after a prompt of a single token has a loss and a gradient: the most work for head and memory.
    """
    tokens, samples = config.train.micro_batch_tokens, list[TrainingSample]()
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    while tokens > 0:
        length = min(tokens, longest)
        samples.append(_sample(length, config, routing, vocab_size))
        tokens -= length
    return pack(samples, shape)


def rows(config: Config, hf_config: Any, layout: Layout, count: int) -> Sequence[MicroBatch]:
    """``count`` full rows, all of one update."""
    shape = RowShape(row_multiple=layout.row_multiple, sequence_multiple=layout.sequence_multiple)
    routing = routing_shape(hf_config, weights=config.train.router_replay_weights)
    row = _full_row(config, shape, routing, hf_config.vocab_size)
    sequences = int((row.loss_mask & (row.position_ids == 0)).sum())
    totals = BatchTotals(num_tokens=count * int(row.loss_mask.sum()), num_sequences=count * sequences)
    return [add_token_weights(row, totals, config.loss)] * count


def _sample(length: int, config: Config, routing: RoutingShape | None, vocab_size: int) -> TrainingSample:
    """A sequence of ``length`` inputs, with every column that the run would have."""
    topk = None
    if config.loss.is_topk:
        ids = torch.arange(config.loss.topk + 1, dtype=torch.int32).expand(length, -1).clone()
        ids[:, -1] = -1
        topk = ids, torch.full(ids.shape, -3.0)
    routes = None
    if routing is not None and config.train.router_replay != "off":
        # Every expert gets as many tokens, in each part of the row.
        experts = torch.arange(length * routing.topk) % routing.num_experts
        one = experts.to(routing.dtype).view(length, 1, routing.topk)
        if routing.weights:
            one = with_weights(one, torch.full(one.shape, 1 / routing.topk))
        routes = one.expand(-1, routing.num_layers, -1).contiguous()
    sampling_mask = None
    if number := kept_ids(config, vocab_size):  # distinct, and the label 1 among them
        ids = torch.arange(1, number + 1, dtype=torch.int32) % vocab_size
        sampling_mask = SamplingMask(ids.repeat(length), torch.full((length,), number, dtype=torch.int32))
    sample = to_training_sample([1], [1] * length, [-0.5] * length, 1.0, topk, routes, sampling_mask=sampling_mask)
    extra = {name: torch.full((length,), -0.5) for name in ("recomputed_logprobs", "reference_logprobs")}
    needed = config.loss.required_inputs | ({"reference_logprobs"} if config.needs_reference else set())
    changes: dict[str, Any] = {name: column for name, column in extra.items() if name in needed}
    return replace(sample, **changes)
