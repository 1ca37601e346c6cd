"""Configurations for tests, as nested dictionaries like those of a TOML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_dppo.config.io import validate
from megatron_dppo.config.layout import Layout, ModelShape
from megatron_dppo.config.schema import Config
from megatron_dppo.engines.serving.command import plan_servers, server_options
from megatron_dppo_engines.serving.server_process import ServerPlan

QWEN3_30B_A3B = ModelShape(
    family="qwen3_moe",
    num_layers=48,
    num_attention_heads=32,
    num_query_groups=4,
    num_experts=128,
    hidden_size=2048,
    vocab_size=151936,
)
ONE_RANK = Layout(
    world_size=1,
    tp=1,
    pp=1,
    vpp=1,
    cp=1,
    dp=1,
    ep=1,
    etp=1,
    expert_dp=1,
    sequence_parallel=False,
    overlap_p2p_comm=False,
)


def minimal() -> dict[str, Any]:
    """Only what has no default."""
    return {
        "run": {"output_dir": "out", "num_steps": 10},
        "model": {"path": "model"},
        "data": {"train": "task:chain_sum"},
        "rollout": {"prompts_per_step": 16, "samples_per_prompt": 8, "max_new_tokens": 32},
        "optimizer": {"lr": 1e-3},
    }


def config(**sections: dict[str, Any]) -> Config:
    """The minimal configuration with some keys of some sections changed."""
    values = minimal()
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return validate(values, "test")


def server_plans(
    config: Config, environ: Mapping[str, str], gpus: Sequence[str] = (), skip_gpus: int = 0
) -> list[ServerPlan]:
    """Return the plans by which ``megatron-dppo serve`` starts the servers of a configuration."""
    options = server_options(
        config.rollout,
        config.model,
        config.lora,
        routed_experts=config.train.needs_engine_routing,
        topk_logprobs=config.topk_logprobs,
    )
    return plan_servers(config.rollout, options, environ, gpus, skip_gpus)
