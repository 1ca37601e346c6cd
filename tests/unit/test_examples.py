"""The configurations that ship."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from megatron_dppo.config.io import dump_toml, load_config, validate
from megatron_dppo.config.layout import ModelShape, resolve_layout
from megatron_dppo.serving.command import plan_servers

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(EXAMPLES.rglob("*.toml"))
QWEN3_30B_A3B = ModelShape(
    num_layers=48,
    num_attention_heads=32,
    num_query_groups=4,
    num_experts=128,
    hidden_size=2048,
    vocab_size=151936,
)


@pytest.mark.parametrize("file", FILES, ids=lambda f: f"{f.parent.name}/{f.name}")
def test_every_example_is_valid_and_survives_being_written(file: Path) -> None:
    config = load_config(file)
    assert validate(tomllib.loads(dump_toml(config)), "again") == config


def test_the_examples_are_found() -> None:
    names = {f"{file.parent.name}/{file.name}" for file in FILES}
    assert {"chain_sum/dppo.toml", "chain_sum/sglang.toml", "chain_sum/vllm.toml", "qwen3_30b_a3b/dppo.toml"} <= names


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_engine_examples_are_the_embedded_task(engine: str) -> None:
    local, served = load_config(EXAMPLES / "chain_sum/dppo.toml"), load_config(EXAMPLES / f"chain_sum/{engine}.toml")
    if engine == "vllm":  # its CPU attention has no heads of 16
        model = local.model.model_copy(update={"path": str(EXAMPLES / "chain_sum/model_vllm")})
        local = local.model_copy(update={"model": model})
    for section in ("model", "parallel", "data", "reward", "loss", "optimizer", "warmup", "eval"):
        assert getattr(served, section) == getattr(local, section), section
    assert served.needs_engine_routing == (engine == "sglang")


def test_the_30b_example_fits_its_nodes() -> None:
    config = load_config(EXAMPLES / "qwen3_30b_a3b/dppo.toml")
    layout = resolve_layout(config, 32, QWEN3_30B_A3B)
    assert (layout.tp, layout.ep, layout.etp, layout.dp, layout.expert_dp) == (2, 8, 1, 16, 4)
    rollout, train = config.rollout, config.train
    assert rollout.prompts_per_step * rollout.samples_per_prompt == 4096
    assert rollout.prompts_per_step // train.mini_batches == 32
    longest = config.data.max_prompt_tokens + rollout.max_new_tokens
    assert train.micro_batch_tokens >= longest and rollout.sglang["context-length"] >= longest
    plans = plan_servers(config, {}, [str(i) for i in range(8)])
    assert [plan.env["CUDA_VISIBLE_DEVICES"] for plan in plans] == ["0,1", "2,3", "4,5", "6,7"]
    assert all("--enable-return-routed-experts" in plan.argv for plan in plans)
