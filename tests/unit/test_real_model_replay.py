"""benchmarks/real_model_replay.py: what it computes from log-probabilities, settings and rows."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.config.io import load_config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("real_model_replay")


def test_distances_are_sums_over_the_sampled_tokens(benchmark: Any) -> None:
    policy, rollout = [-0.5, -1.0, -2.0], [-0.7, -1.0, -1.9]
    result = benchmark.distances(torch.tensor(policy), torch.tensor(rollout), torch.tensor([True, False, True]))
    pairs = [(policy[i], rollout[i]) for i in (0, 2)]
    assert result["abs_prob"] == pytest.approx(sum(abs(math.exp(p) - math.exp(q)) for p, q in pairs))
    assert result["k3"] == pytest.approx(sum(math.exp(p - q) - 1 - (p - q) for p, q in pairs), rel=1e-5)


@pytest.mark.parametrize("engine", ["local", "sglang", "vllm"])
def test_the_settings_of_each_engine_are_a_configuration(benchmark: Any, engine: str, tmp_path: Path) -> None:
    settings = benchmark.write_settings(engine, tmp_path / "model", tmp_path)
    config = load_config(str(benchmark.CONFIG), benchmark.overrides(settings))
    assert (config.rollout.engine, config.loss.name, config.rollout.dtype) == (engine, "dppo_binary_tv", "bf16")
    assert (
        "Explain each step."
        in json.loads((tmp_path / "train.jsonl").read_text().splitlines()[0])["prompt"][0]["content"]
    )


def test_the_table_of_the_recorded_rows_is_that_of_the_page(benchmark: Any) -> None:
    rows = benchmark.read_rows(ROOT / "docs/results/real_model/paired_replay.jsonl")
    cells = {(benchmark.row_variant(row).name, row["seed"]): benchmark.summary(row) for row in rows}
    own, replayed = (cells["sglang-rollout", 0][f"{label}_abs_prob"] for label in ("live", "replayed"))
    assert f"{own:.4f} {replayed:.4f} {cells['sglang-rollout', 0]['routes']:.3f}" == "0.0062 0.0060 0.014"
    assert f"{cells['vllm-off', 0]['live_abs_prob']:.4f}" == "0.0052"
