"""Divergences and trust regions against float64 worked cases, at their boundaries and at probabilities 0 and 1."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.losses import binary_kl, binary_tv, ratio_keep_mask
from megatron_dppo.losses.dppo import divergence_keep_mask

DATA = json.loads((Path(__file__).parents[2] / "data" / "dppo_cases.json").read_text())
CASES = {case["name"]: case for case in DATA["cases"]}
DTYPES = (torch.float64, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_divergences_of_the_worked_case(case: dict[str, Any], dtype: torch.dtype) -> None:
    log_p, log_m = (torch.tensor([case[key]], dtype=torch.float64).log().to(dtype) for key in ("pi_a", "mu_a"))
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    assert float(binary_tv(log_p, log_m)) == pytest.approx(case["divergence"]["binary_tv"], abs=tolerance)
    assert float(binary_kl(log_p, log_m)) == pytest.approx(case["divergence"]["binary_kl"], abs=tolerance)


@pytest.mark.parametrize("edge", DATA["binary_kl_edges"], ids=lambda e: f"{e['mu_a']}-{e['pi_a']}")
def test_binary_kl_is_exact_next_to_probability_one(edge: dict[str, float]) -> None:
    log_p, log_m = (torch.tensor([math.log(edge[key])], dtype=torch.float64) for key in ("pi_a", "mu_a"))
    assert float(binary_kl(log_p, log_m)) == pytest.approx(edge["exact"], rel=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_binary_kl_at_probabilities_zero_and_one(dtype: torch.dtype) -> None:
    log_p = torch.tensor([0.5, 0.0, 1.0, 0.0, 1.0, 1.0], dtype=dtype).log()
    log_m = torch.tensor([0.0, 0.0, 1.0, 0.5, 0.5, 0.9999], dtype=dtype).log()
    divergence = binary_kl(log_p, log_m)
    assert float(divergence[0]) == pytest.approx(math.log(2), rel=1e-6)
    assert divergence[1:3].tolist() == pytest.approx([0.0, 0.0], abs=1e-6)
    assert float(divergence[3]) == math.inf
    # pi that was rounded to 1: large, but finite
    assert 5 < float(divergence[4]) < 40
    assert 0 < float(divergence[5]) < 0.01


def test_fp32_binary_kl_of_confident_tokens_does_not_cancel() -> None:
    log_p, log_m = torch.tensor([-1e-5, -1e-6, -3.0]), torch.tensor([-2e-3, -1e-4, -1e-5])
    exact = binary_kl(log_p.double(), log_m.double())
    torch.testing.assert_close(binary_kl(log_p, log_m).double(), exact, rtol=1e-5, atol=0)


def test_divergences_of_bf16_log_probabilities_are_computed_in_fp32() -> None:
    log_p, log_m = torch.tensor([-0.0305, -6.9]).bfloat16(), torch.tensor([-0.03, -6.8]).bfloat16()
    for function in (binary_tv, binary_kl):
        result = function(log_p, log_m)
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, function(log_p.double(), log_m.double()).float(), rtol=1e-3, atol=1e-7)


def test_a_divergence_equal_to_the_threshold_is_kept_and_one_above_is_masked() -> None:
    threshold = 0.125
    above = math.nextafter(threshold, 1.0)
    divergence = torch.tensor([threshold, threshold, above, above], dtype=torch.float64)
    log_ratio = torch.tensor([0.2, -0.2, 0.2, -0.2], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    keep = divergence_keep_mask(divergence, log_ratio, advantages, threshold, threshold)
    assert keep.tolist() == [True, True, False, False]


def test_low_threshold_holds_for_negative_and_high_for_positive_advantages() -> None:
    divergence = torch.full((2,), 0.3)
    log_ratio, advantages = torch.tensor([1.0, -1.0]), torch.tensor([1.0, -1.0])
    assert divergence_keep_mask(divergence, log_ratio, advantages, 0.2, 0.4).tolist() == [True, False]
    assert divergence_keep_mask(divergence, log_ratio, advantages, 0.4, 0.2).tolist() == [False, True]


def test_updates_that_lead_back_and_zero_advantages_are_kept() -> None:
    log_ratio = torch.tensor([-1.0, 1.0, 0.0, 0.0, 1.0, -1.0])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, 0.0])
    assert divergence_keep_mask(torch.full((6,), 9.0), log_ratio, advantages, 0.1, 0.1).all()
    assert ratio_keep_mask(log_ratio, advantages, 0.2, 0.28).all()
