"""benchmarks/token_statistics.py: engine against policy, and what each rule masks."""

from __future__ import annotations

import importlib
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_dppo.config.io import validate
from megatron_dppo.config.schema import Config
from megatron_dppo.hf.folder import build_hf_model, read_hf_config, stream_model
from megatron_dppo_lab.catalogue import TASKS
from megatron_dppo_lab.embedded_tasks import write_model_folder
from megatron_dppo_lab.grid import PLACEHOLDER_PATHS, merged

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("token_statistics")


def config(**rollout: Any) -> Config:
    return validate(merged(TASKS["rare_words"], PLACEHOLDER_PATHS, {"rollout": rollout}), "test")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_model_folder("rare_words", folder)
    model = build_hf_model(read_hf_config(folder), torch.float32, seed=1)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)  # probabilities in many bins
    save_file({name: weight.contiguous() for name, weight in stream_model(model)}, folder / "model.safetensors")
    return folder


def test_an_engine_without_a_mismatch_has_the_policys_probabilities_and_noise_is_seen(
    benchmark: Any, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "SAMPLES", 2)
    same = benchmark.score(config(), base, base)
    noisy = benchmark.score(config(perturbation={"router_noise": 1.0}), base, base)
    assert 64 * 2 <= len(same.ids) <= 64 * 2 * 2
    for scored, small in ((same, True), (noisy, False)):
        filled = [b for b in benchmark.bins(scored) if b["tokens"]]
        assert len(filled) > 3 and sum(b["tokens"] for b in filled) == len(scored.ids)
        assert (max(b["tv"] for b in filled) < 1e-4) == small
        assert all(abs(b["ratio"][1] - 1) < 1e-3 for b in filled) == small


MU = [0.005, 0.005, 0.2, 0.5, 0.5, 0.95]
PI = [0.010, 0.003, 0.4, 0.6, 0.3, 0.99]
ADVANTAGES = [1.0, -1.0, 1.0, 1.0, -1.0, 0.0]
"""The ratio leaves [.8, 1.28] at all but the fourth token, the probability moves by .15 at the third and the fifth."""


def test_what_a_rule_masks_is_counted_by_probability_and_by_word(benchmark: Any, tmp_path: Path) -> None:
    ids = torch.tensor([70, 71, 72, 70, 70, 2])
    scored = benchmark.Scored(ids, torch.tensor(MU).log(), torch.tensor(PI).log(), torch.tensor(ADVANTAGES))
    result = {"bins": benchmark.bins(scored), **benchmark.masked_tokens(scored, lambda token: f"w{token}")}
    assert result["grpo"]["share"] == pytest.approx(4 / 5)
    assert result["dppo_binary_tv"]["share"] == pytest.approx(2 / 5)
    edges = benchmark.EDGES
    index = {(low, high): i for i, (low, high) in enumerate(pairwise(edges))}
    rare, middle, sure = index[1e-3, 1e-2], index[0.3, 0.6], index[0.9, 0.99]
    assert [result[r]["bins"][rare] for r in ("grpo", "dppo_binary_tv")] == [1.0, 0.0]
    assert [result[r]["bins"][middle] for r in ("grpo", "dppo_binary_tv")] == [0.5, 0.5]
    assert result["grpo"]["bins"][sure] is None  # no advantage, no update
    first = result["grpo"]["words"][0]
    assert (first["word"], first["masked"]) == ("w70", 2)
    assert result["bins"][rare]["tv"] == pytest.approx(0.0035) and result["bins"][rare]["tokens"] == 2
    assert result["bins"][rare]["ratio"][1] == pytest.approx((2.0 + 0.6) / 2)

    text = benchmark.table("none", [result])
    assert "| 0.001 to 0.01 | 2 | 3.5e-03 [3.5e-03, 3.5e-03] |" in text
    assert "`grpo` masks 80.0% [80.0%, 80.0%] of the tokens with an advantage" in text and "w70 (2, mu" in text


def test_the_recorded_rows_give_the_tables_and_figures_of_the_page_without_a_run(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "measure", lambda *_: pytest.fail("a measurement was started"))
    monkeypatch.setattr(sys, "argv", ["token_statistics.py", "--output", str(tmp_path)])
    benchmark.main()
    assert "| 0.0001 to 0.001 | 3132 | 1.4e-06" in (tmp_path / "ratio_tv.md").read_text()
    assert "`grpo` masks 45.9%" in (tmp_path / "most_clipped.md").read_text()
    for name in ("ratio_tv", "most_clipped"):
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
