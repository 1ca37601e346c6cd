"""The aliases against each framework's gradient, written out here from its published formula."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.config.loss_aliases import ALIAS_VERSIONS, LOSS_ALIASES
from tests.unit.losses.test_loss_cases import CASES, run_case

ALIASES = sorted(set(LOSS_ALIASES) - {"score_centering"})
"""Score centering is in ``test_centering``."""
DOC = (Path(__file__).parents[3] / "docs/loss_details.md").read_text(encoding="utf-8")
ROWS = DOC.partition("## Names of other frameworks")[2].splitlines()


def binary_tv(case: dict[str, Any], old: float) -> float:
    return abs(case["pi_a"] - old)


def binary_kl(case: dict[str, Any], old: float) -> float:
    p, m = case["pi_a"], old
    return m * math.log(m / p) + (1 - m) * math.log((1 - m + 1e-8) / (1 - p + 1e-8))


def topk(case: dict[str, Any], kind: str) -> float:
    return case["divergence"][f"topk_{kind}_impl"]


def framework_weight(alias: str, case: dict[str, Any]) -> float:
    """M * w of the framework's loss, the factor of -A grad log pi."""
    stack, name = alias.split("/")
    ratio, advantage = case["ratio"], case["A"]
    old = case["pi_old_a"] if "recompute" in name else case["mu_a"]
    low = high = {"trl": 0.15, "2026-08-11": 0.1, "2026-08-27": 0.1, "2026-09-18": 0.3}.get(
        name if stack == "prime_rl" else stack, 0.2
    )
    cap = {"verl": 3.0, "stable_rl": 3.0, "trl": 20.0, "prime_rl": math.inf, "skyrl": math.inf}.get(stack, math.inf)
    if stack == "drpo":
        delta = 12.5 if name == "paper" else float(name)
        return ratio * (1 - math.copysign(1, advantage) * (case["pi_a"] - case["mu_a"]) / delta)
    if stack == "spo":
        return ratio * (1 - math.copysign(1, advantage) * (ratio - 1) / 12.5)
    if name == "cispo":
        return min(max(ratio, 0.8), 1.2)
    if name == "pg_no_mask":
        return min(ratio, cap)
    if name in ("vanilla", "gspo", "ppo", "ppo_recompute"):
        compared = case["pi_a"] / old
        dropped = compared > 1 + high if advantage > 0 else compared < 1 - low
        if name == "vanilla":
            dropped = dropped or (advantage < 0 and ratio > 3.0)
        return 0.0 if dropped else (ratio if name in ("vanilla", "gspo") else min(ratio, cap))
    if "topk" in name:
        divergence = topk(case, "kl" if "kl" in name else "tv")
    else:
        divergence = (binary_kl if "kl" in name else binary_tv)(case, old)
    if alias in ("prime_rl/2026-08-27", "prime_rl/2026-09-18"):  # IPO
        return 0.0 if divergence > low + 1e-12 else ratio
    away = case["pi_a"] > old if advantage > 0 else case["pi_a"] < old
    return 0.0 if away and divergence > (high if advantage > 0 else low) else min(ratio, cap)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_has_the_gradient_of_its_framework_on_the_worked_case(alias: str, case: dict[str, Any]) -> None:
    keys: dict[str, Any] = {"topk": case["K"]} if "topk" in alias else {}
    if alias.endswith("/paper"):  # with their aggregation in ``test_published_forms``
        keys = {"aggregation": None, "horizon": None}
    if alias == "skyrl/default":  # with its centering in ``test_centering``
        keys = {"centering": False}
    if alias == "prime_rl/2026-09-18":  # one case is on the threshold, or a rounding of exp beyond
        keys = dict.fromkeys(("divergence_threshold_low", "divergence_threshold_high"), 0.3 + 1e-12)
    _, grad = run_case(LossConfig(name=alias, **keys), case, torch.float64)
    step = -case["A"] * framework_weight(alias, case)
    if alias.startswith("prime_rl/") and alias != "prime_rl/2026-09-18":  # plus 0.001 log^2 r on every token
        step += 0.002 * case["log_ratio"]
    want = [step * ((j == case["a"]) - p) for j, p in enumerate(case["pi"])]
    assert grad.tolist() == pytest.approx(want, rel=1e-9, abs=1e-12)


def test_without_a_penalty_the_alias_has_none_of_its_keys() -> None:
    config = LossConfig(name="prime_rl/2026-04", kl_coef=0.0)
    assert (config.kl_coef, config.kl_estimator, config.form) == (0.0, "k3", "ratio")


def test_explicit_keys_win_over_those_of_the_alias() -> None:
    config = LossConfig(name="verl/dppo_kl", ratio_cap=10000.0, divergence_threshold_low=0.05)
    assert (config.name, config.ratio_cap, config.thresholds) == ("dppo_binary_kl", 10000.0, (0.05, 0.2))


def test_a_resolved_alias_is_an_ordinary_configuration() -> None:
    for alias in ALIASES:
        config = LossConfig(name=alias)
        assert LossConfig(**config.model_dump()) == config


def test_every_framework_has_the_version_that_its_aliases_describe() -> None:
    assert {alias.partition("/")[0] for alias in LOSS_ALIASES if "/" in alias} == set(ALIAS_VERSIONS)
    for framework, version in ALIAS_VERSIONS.items():
        assert f"| `{framework}` | {version} |" in DOC
        assert framework == "prime_rl" or "2026" in version, framework


def test_the_page_lists_every_alias_with_its_keys() -> None:
    for alias, keys in LOSS_ALIASES.items():
        line = next(line for line in ROWS if line.startswith(f"| `{alias}`"))
        assert f"`{keys['name']}`" in line
        for key, value in keys.items():
            assert key == "name" or f"`{key} = {json.dumps(value)}`" in line, (alias, key)
