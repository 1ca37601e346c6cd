"""The mapping table covers the real models completely; joins, splits and shards are inverse to each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from megatron_dppo.hf.folder import model_shape, stream_model
from megatron_dppo.mcore import mapping

COMMON: dict[str, Any] = dict(
    vocab_size=151936,
    head_dim=128,
    num_attention_heads=32,
    tie_word_embeddings=False,
    rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    max_position_embeddings=40960,
)
QWEN3_30B_A3B = Qwen3MoeConfig(
    **COMMON,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=48,
    num_key_value_heads=4,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    norm_topk_prob=True,
)
QWEN3_8B = Qwen3Config(**COMMON, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_key_value_heads=8)


def meta_weights(config: Any) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        return dict(stream_model(AutoModelForCausalLM.from_config(config)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (QWEN3_30B_A3B, {"mlp.experts.linear_fc1.weight127": (1536, 2048), "linear_qkv.weight": (5120, 2048)}),
        (QWEN3_8B, {"mlp.linear_fc1.weight": (24576, 4096), "linear_qkv.weight": (6144, 4096)}),
    ],
    ids=["Qwen3-30B-A3B", "Qwen3-8B"],
)
def test_real_models_map_completely(config: Any, expected: dict[str, tuple[int, int]]) -> None:
    """Every name once, every shape back; the Megatron shapes are (q + k + v heads) * 128 and 2 * ffn by hidden."""
    weights, shape = meta_weights(config), model_shape(config)
    mapped: list[str] = []
    result: dict[str, tuple[int, ...]] = {}
    for rule, layer, expert in mapping.parameters(shape, tied=False):
        name, hf_names = rule.names(layer, expert)
        assert mapping.find_rule(name, shape, tied=False) == (rule, layer, expert)
        full = rule.join([weights[n] for n in hf_names], shape)
        parts = rule.split(full, shape)
        assert [p.shape for p in parts] == [weights[n].shape for n in hf_names], name
        for size in (1, 2, 4):
            shards = [mapping.shard(rule, full, rank, size, shape) for rank in range(size)]
            assert mapping.unshard(rule, shards, shape).shape == full.shape, name
        result[name] = tuple(full.shape)
        mapped += hf_names
    assert sorted(mapped) == sorted(weights)
    for ending, size in expected.items():
        assert {s for n, s in result.items() if n.endswith(ending)} == {size}


def test_values_survive_join_split_shard_and_unshard() -> None:
    config = Qwen3MoeConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=8,
        moe_intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=4,
        num_experts=2,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )
    shape, weights = model_shape(config), dict(stream_model(AutoModelForCausalLM.from_config(config)))
    for rule, layer, expert in mapping.parameters(shape, tied=False):
        parts = [weights[n] for n in rule.names(layer, expert)[1]]
        full = rule.join(parts, shape)
        for size in (1, 2, 4):
            second = mapping.unshard(
                rule, [mapping.shard(rule, full, rank, size, shape) for rank in range(size)], shape
            )
            assert torch.equal(second, full)
        assert all(torch.equal(a, b) for a, b in zip(rule.split(full, shape), parts, strict=True))


def test_each_tensor_parallel_shard_holds_whole_query_groups() -> None:
    """Shard r of the joined qkv is the join of shard r of q, k and v: what attention on that rank expects."""
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=4,
    )
    shape, weights = model_shape(config), dict(stream_model(AutoModelForCausalLM.from_config(config)))
    rule, _, _ = mapping.find_rule("decoder.layers.0.self_attention.linear_qkv.weight", shape, tied=False)
    parts = [weights[n] for n in rule.names(0, 0)[1]]
    small = model_shape(Qwen3Config(**(config.to_dict() | {"num_attention_heads": 4, "num_key_value_heads": 2})))
    for rank in range(2):
        local = rule.join([p.chunk(2, 0)[rank] for p in parts], small)
        assert torch.equal(mapping.shard(rule, rule.join(parts, shape), rank, 2, shape), local)
