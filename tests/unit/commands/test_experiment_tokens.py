"""Measurements of single tokens: engine against policy, and what each rule masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_dppo.commands.experiments import tokens
from megatron_dppo.commands.experiments.catalogue import TASKS
from megatron_dppo.commands.experiments.grid import PLACES, merged
from megatron_dppo.commands.experiments.token_report import token_tables, write_token_page
from megatron_dppo.commands.experiments.tokens import Scored
from megatron_dppo.config.io import validate
from megatron_dppo.config.schema import Config
from megatron_dppo.data.tasks import write_model_folder
from megatron_dppo.hf.folder import build_hf_model, read_hf_config, stream_model


def config(**rollout: Any) -> Config:
    return validate(merged(TASKS["rare_words"], PLACES, {"rollout": rollout}), "test")


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
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "SAMPLES", 2)
    same = tokens.ratio_tv(config(), base, base)
    noisy = tokens.ratio_tv(config(perturbation={"router_noise": 1.0}), base, base)
    assert 64 * 2 <= same["tokens"] <= 64 * 2 * 2
    for found, small in ((same, True), (noisy, False)):
        filled = [b for b in found["bins"] if b["tokens"]]
        assert len(filled) > 3 and sum(b["tokens"] for b in filled) == found["tokens"]
        assert (max(b["tv"] for b in filled) < 1e-4) == small
        assert all(abs(b["ratio"][1] - 1) < 1e-3 for b in filled) == small


MU = [0.005, 0.005, 0.2, 0.5, 0.5, 0.95]
PI = [0.010, 0.003, 0.4, 0.6, 0.3, 0.99]
ADVANTAGES = [1.0, -1.0, 1.0, 1.0, -1.0, 0.0]
"""The ratio leaves [.8, 1.28] at all but the fourth token, the probability moves by .15 at the third and the fifth."""


def test_what_a_rule_masks_is_counted_by_probability_and_by_word(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.tensor([70, 71, 72, 70, 70, 2])
    scored = Scored(ids, torch.tensor(MU).log(), torch.tensor(PI).log(), torch.tensor(ADVANTAGES))
    monkeypatch.setattr(tokens, "_score", lambda *_: scored)
    found = tokens.most_clipped(config(), base, tmp_path)
    assert found["grpo"]["share"] == pytest.approx(4 / 5)
    assert found["dppo_binary_tv"]["share"] == pytest.approx(2 / 5)
    place = {(low, high): i for i, (low, high) in enumerate(zip(tokens.EDGES, tokens.EDGES[1:], strict=False))}
    rare, middle, sure = place[1e-3, 1e-2], place[0.3, 0.6], place[0.9, 0.99]
    assert [found[r]["bins"][rare] for r in ("grpo", "dppo_binary_tv")] == [1.0, 0.0]
    assert [found[r]["bins"][middle] for r in ("grpo", "dppo_binary_tv")] == [0.5, 0.5]
    assert found["grpo"]["bins"][sure] is None  # no advantage, no update
    first = found["grpo"]["words"][0]
    assert (first["word"], first["masked"]) == ("w0002", 2)
    assert found["bins"][rare]["tv"] == pytest.approx(0.0035) and found["bins"][rare]["tokens"] == 2
    assert found["bins"][rare]["ratio"][1] == pytest.approx((2.0 + 0.6) / 2)

    row = {"task": "rare_words", "mismatch": "none", "loss": "x", "seed": 0, "phase": "report", "tokens": found}
    text = token_tables([row])
    assert "| 0.001 to 0.01 | 2 | 3.5e-03 [3.5e-03, 3.5e-03] |" in text
    assert "`grpo` masks 80.0% [80.0%, 80.0%] of the tokens with an advantage" in text and "w0002 (2, mu" in text
    write_token_page([row], tmp_path / "page.png", "Tokens")
    assert (tmp_path / "page.png").read_bytes()[:4] == b"\x89PNG"
