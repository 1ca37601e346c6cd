"""Every loss against the float64 worked cases: divergence, mask, value, and the gradient of all logits."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.losses import policy_loss
from megatron_dppo.types import LossInputs, LossOutput
from tests.unit.loss_inputs import topk_fields, value

DATA = json.loads((Path(__file__).parents[2] / "data" / "dppo_cases.json").read_text())
CASES = {case["name"]: case for case in DATA["cases"]}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}

VARIANTS: dict[str, dict[str, Any]] = {
    "binary_tv": {"name": "dppo_binary_tv"},
    "binary_kl": {"name": "dppo_binary_kl"},
    "topk_tv_paper": {"name": "dppo_topk_tv"},
    "topk_kl_paper": {"name": "dppo_topk_kl"},
    "topk_tv_impl": {"name": "dppo_topk_tv", "topk_eviction": True},
    "topk_kl_impl": {"name": "dppo_topk_kl", "topk_eviction": True},
    "binary_tv_recompute": {"name": "dppo_recompute_binary_tv"},
    "binary_kl_recompute": {"name": "dppo_recompute_binary_kl"},
    "binary_tv_ratio_form": {"name": "dppo_binary_tv", "form": "ratio"},
    "grpo_cliphigher": {"name": "grpo"},
    "minirl": {"name": "minirl"},
    "pg_is": {"name": "pg_is"},
    "pg_tis_cispo_C3": {"name": "cispo", "ratio_cap": 3.0},
    "minirl_tis_C3": {"name": "minirl", "ratio_cap": 3.0},
    "cispo_two_sided": {"name": "cispo", "ratio_floor": 0.8, "ratio_cap": 1.28},
    "ppo_clip_dual3": {"name": "ppo_clip", "dual_clip": 3.0},
    "ppo_clip_nodual": {"name": "ppo_clip"},
    "decoupled_ppo_tis2": {"name": "ppo_decoupled", "mismatch": "truncate"},
    "decoupled_ppo_icepop_0.5_2": {"name": "ppo_decoupled", "mismatch": "mask_token"},
}


def case_config(variant: str, case: dict[str, Any]) -> LossConfig:
    keys = dict(VARIANTS[variant])
    if "ratio_cap" not in keys and not keys["name"].startswith("ppo_"):
        keys["ratio_cap"] = "off" if math.isinf(float(case["C"])) else float(case["C"])
    if keys["name"].startswith("dppo_"):
        delta = case["delta_kl" if keys["name"].endswith("_kl") else "delta_tv"]
        keys["divergence_threshold_low"] = keys["divergence_threshold_high"] = delta
    if "topk" in keys["name"]:
        keys["topk"] = case["K"]
    return LossConfig(**keys)


def run_case(
    config: LossConfig, case: dict[str, Any], dtype: torch.dtype, other: bool = True
) -> tuple[LossOutput, Tensor]:
    """The output, and the gradient with respect to the 8 logits.

    The softmax is float64 in both cases: case 06 sits exactly on a threshold, which an fp32 softmax would miss.
    """
    logits = torch.tensor(case["pi"], dtype=torch.float64).log().requires_grad_()
    logprobs = logits.log_softmax(-1)
    mu = torch.tensor([case["mu"]], dtype=torch.float64)
    topk = topk_fields(logprobs.exp()[None], mu, torch.tensor([case["a"]]), case["K"])
    if not other:
        topk["topk_other_logprob"] = None
    inputs = LossInputs(
        logprobs=logprobs[case["a"]].reshape(1).to(dtype),
        advantages=torch.tensor([case["A"]], dtype=dtype),
        loss_mask=torch.tensor([True]),
        rollout_logprobs=mu[:, case["a"]].log().to(dtype),
        sequence_ids=torch.tensor([0]),
        token_weights=torch.ones(1),
        recomputed_logprobs=torch.tensor([case["pi_old_a"]], dtype=torch.float64).log().to(dtype),
        **{k: v.to(dtype) if v is not None and v.is_floating_point() else v for k, v in topk.items()},
    )
    output = policy_loss(inputs, config)
    output.loss_sum.backward()
    return output, logits.grad


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_loss_gradient_and_mask_of_the_worked_case(case: dict[str, Any], variant: str, dtype: torch.dtype) -> None:
    output, grad = run_case(case_config(variant, case), case, dtype)
    want, tolerance = case["variants"][variant], TOLERANCE[dtype]
    assert output.loss_sum.item() == pytest.approx(want["loss"], rel=tolerance, abs=tolerance)
    torch.testing.assert_close(grad, torch.tensor(want["grad_z"], dtype=torch.float64), rtol=tolerance, atol=tolerance)
    assert output.loss_sum.dtype == dtype
    # With A = 0 the worked cases take the negative branch, equation 12 neither; nothing but a metric could tell.
    if case["A"] != 0 and variant in case["mask"]:
        assert bool(output.keep_mask) == bool(case["mask"][variant])


def test_every_variant_of_every_worked_case_is_tested() -> None:
    for case in CASES.values():
        assert set(case["variants"]) == set(VARIANTS)


@pytest.mark.parametrize("other", [True, False], ids=["pi of other given", "by subtraction"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "variant", ["binary_tv", "binary_kl", "topk_tv_paper", "topk_kl_paper", "topk_tv_impl", "topk_kl_impl"]
)
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_divergence_of_the_worked_case(case: dict[str, Any], variant: str, dtype: torch.dtype, other: bool) -> None:
    output, _ = run_case(case_config(variant, case), case, dtype, other)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    assert value(output, "divergence") == pytest.approx(case["divergence"][variant], abs=tolerance)


def test_recompute_measures_the_divergence_from_recomputed_logprobs_and_weighs_with_mu() -> None:
    case = CASES["09_anchor_disagrees"]
    output, _ = run_case(case_config("binary_tv_recompute", case), case, torch.float64)
    assert value(output, "divergence") == pytest.approx(abs(case["pi_a"] - case["pi_old_a"]))
    assert value(output, "ratio") == pytest.approx(case["ratio"])
