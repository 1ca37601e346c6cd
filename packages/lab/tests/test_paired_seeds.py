"""Exact tests over paired seeds against scipy and worked cases; verdicts that name losses and settings."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy import stats

from megatron_dppo_lab.experiment import Claim
from megatron_dppo_lab.grid import GridRun
from megatron_dppo_lab.named import EXPERIMENTS
from megatron_dppo_lab.paired import (
    ALPHA,
    compare,
    effect_size,
    format_columns,
    format_comparisons,
    holm,
    sign_flip_p_value,
)

SEEDS = range(10)


def _scipy_p_value(differences: list[float]) -> float:
    """Flip signs with scipy: paired samples whose difference is the given one, all 2^n permutations."""
    zeros = np.zeros(len(differences))
    result = stats.permutation_test(
        (np.array(differences), zeros),
        lambda first, second, axis: (first - second).mean(axis=axis),
        permutation_type="samples",
        n_resamples=np.inf,
        alternative="two-sided",
    )
    return float(result.pvalue)


def test_the_sign_flip_test_equals_scipys_exact_permutation_test() -> None:
    rng = random.Random(3)
    cases = [[rng.gauss(shift, 1.0) for _ in range(count)] for count in (2, 5, 8, 11) for shift in (0.0, 0.5, 3.0)]
    # Equal absolute values and zeros: ties that rounding must not break.
    cases += [[0.1, 0.2, 0.3, -0.3, 0.1], [0.7, 0.0, 0.0, 0.1], [0.1] * 6, [-0.3, 0.1, 0.1, 0.1]]
    for differences in cases:
        assert sign_flip_p_value(differences) == pytest.approx(_scipy_p_value(differences), abs=1e-12), differences


def test_the_sign_flip_test_by_hand() -> None:
    # Of the eight sums of +-1 +-2 +-4, only 7 and -7 are as far from 0 as 7.
    assert sign_flip_p_value([1, 2, 4]) == sign_flip_p_value([-1, -2, -4]) == 2 / 8
    # 5, 7, -5 and -7 are at least as far as 5.
    assert sign_flip_p_value([-1, 2, 4]) == 4 / 8
    assert sign_flip_p_value([0, 0, 0]) == 1.0
    # The least p of five seeds is above .05, and that of twelve is below .05 / 100.
    assert sign_flip_p_value([0.1] * 5) == 0.0625
    assert sign_flip_p_value([0.1 + 0.01 * i for i in range(12)]) == 2 / 4096
    for wrong in ([], [1.0] * 21):
        with pytest.raises(ValueError, match=f"{len(wrong)} paired differences; expected 1"):
            sign_flip_p_value(wrong)


def test_holm_by_hand() -> None:
    # Sorted .01, .03, .04: times 3, 2, 1, and never below an earlier one.
    assert holm([0.04, 0.01, 0.03], 3) == pytest.approx([0.06, 0.03, 0.06])
    # Two unfinished comparisons count: times 5, 4, 3.
    assert holm([0.04, 0.01, 0.03], 5) == pytest.approx([0.12, 0.05, 0.12])
    assert holm([0.5, 0.9], 2) == [1.0, 1.0]
    assert holm([], 4) == []
    with pytest.raises(ValueError, match="2 p-values of 1 comparisons"):
        holm([0.1, 0.1], 1)


def test_a_verdict_stays_when_more_comparisons_are_finished() -> None:
    rng = random.Random(5)
    for _ in range(200):
        p_values = [rng.choice((1e-4, 1e-3, 5e-3, 0.02, 0.3)) for _ in range(12)]
        before = holm([*p_values[:5], *[1.0] * 7], 12)[:5]
        assert before == holm(p_values[:5], 12)
        after = holm(p_values, 12)[:5]
        assert all(late <= early for late, early in zip(after, before, strict=True))


def test_the_effect_size_is_the_mean_in_standard_deviations_over_seeds() -> None:
    assert effect_size([1.0, 2.0, 3.0]) == pytest.approx(2.0)
    differences = [0.3, -0.1, 0.25, 0.4]
    # t = d_z sqrt(n), by scipy.
    assert effect_size(differences) == pytest.approx(stats.ttest_1samp(differences, 0).statistic / 2)
    assert effect_size([0.1, 0.1]) is None and effect_size([0.1]) is None


def _run(loss: str, seed: int, phase: str = "report", **table: Any) -> GridRun:
    settings = {"run": {"num_steps": 1, "seed": seed}, "loss": {"name": loss, **table}, "train": {}, "rollout": {}}
    return GridRun("rare_words", loss, "staleness 8", seed, settings, phase=phase)


def _row(run: GridRun, reward: float) -> dict[str, Any]:
    names = {name: getattr(run, name) for name in ("key", "task", "loss", "mismatch", "seed", "phase", "settings")}
    return {**names, "curves": {"rollout/reward": [reward]}, "cpu_seconds": 360.0, "error": ""}


TABLES = {
    "dppo_topk_tv": {"divergence_threshold_low": 0.3, "divergence_threshold_high": 0.3},
    "dppo_binary_tv": {"divergence_threshold_low": 0.1, "divergence_threshold_high": 0.2, "ratio_cap": 5.0},
    "grpo": {},
    "pg_is": {},
    "ipo": {},
    "cispo": {},
}
CLAIMS = [
    Claim("A", "dppo_topk_tv", "dppo_binary_tv"),
    Claim("B", "grpo", "dppo_binary_tv"),
    Claim("C", "pg_is", "dppo_binary_tv"),
    Claim("D", "ipo", "dppo_binary_tv"),
    Claim("E", "cispo", "dppo_binary_tv"),
    Claim("F", "sapo", "dppo_binary_tv"),
]


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch) -> tuple[list[GridRun], list[dict[str, Any]]]:
    """Declared runs and finished rows: one loss is above on every seed, one below, one either, one is unfinished."""
    monkeypatch.setattr(GridRun, "refusal", "")
    runs = {(loss, seed): _run(loss, seed, **table) for loss, table in TABLES.items() for seed in SEEDS}
    gain = {
        "dppo_topk_tv": lambda seed: 0.01 * (seed + 1),
        "grpo": lambda seed: -0.1,
        "pg_is": lambda seed: 0.1 * (-1) ** seed,
        "ipo": lambda seed: 0.2,
        "cispo": lambda seed: -0.1 if seed == 3 else 0.1,
        "dppo_binary_tv": lambda seed: 0.0,
    }
    # The seeds themselves differ far more than the losses do.
    rows = [
        _row(run, 0.05 * seed + gain[loss](seed)) for (loss, seed), run in runs.items() if (loss, seed) != ("ipo", 7)
    ]
    return list(runs.values()), rows


def test_a_verdict_names_both_losses_with_their_settings_the_effect_and_the_corrected_p(
    grid: tuple[list[GridRun], list[dict[str, Any]]],
) -> None:
    runs, rows = grid
    lines = format_comparisons(compare(CLAIMS, rows, runs)).splitlines()
    assert lines[0].startswith("5 declared comparisons.")
    assert lines[1] == "With 10 seeds the least corrected p is 0.0098: a verdict is possible."
    cells = [line.strip("| ").split(" | ") for line in lines[5:]]
    assert cells[0][0] == (
        "A: dppo_topk_tv (dppo_topk_tv, delta 0.3) against dppo_binary_tv (dppo_binary_tv, "
        "divergence_threshold_low 0.1, divergence_threshold_high 0.2, ratio_cap 5.0), `whole`"
    )
    assert [each[1] for each in cells] == ["rare_words, staleness 8"] * 5
    undecided = "cannot be told apart"
    assert [each[2] for each in cells] == ["above", "below", undecided, "9 of 10 seeds", undecided]
    # d_z by hand: mean .055, deviation .0303.
    assert cells[0][3:] == ["+0.055 [+0.010, +0.100]", "+1.8", "0.002", "0.0098"]
    # One of ten seeds against the rest: 22 of 1,024 sign assignments. The third of five p-values counts three times.
    assert cells[4][5:] == ["0.021", "0.064"]
    assert cells[2][5:] == ["1", "1"] and cells[3][4:] == ["-", "-", "-"]


def test_five_seeds_carry_no_verdict_and_the_table_says_so(grid: tuple[list[GridRun], list[dict[str, Any]]]) -> None:
    runs, rows = grid
    few = [run for run in runs if run.seed < 5]
    text = format_comparisons(compare(CLAIMS, [row for row in rows if row["seed"] < 5], few))
    assert "With 5 seeds the least corrected p is 0.31: no verdict is possible." in text
    assert " above " not in text and " below " not in text


def test_the_third_edition_has_seeds_enough_for_verdicts_and_every_claim_has_a_condition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GridRun, "refusal", "")
    third = EXPERIMENTS["windtunnel3"]
    comparisons = compare(third.claims, [], third.report(False, None, ()))
    assert {each.claim for each in comparisons} == set(third.claims)
    assert all(len(each.seeds) == 12 for each in comparisons)
    # One sign on all twelve seeds, for any number of the declared comparisons.
    assert 2 / 2**12 * len(comparisons) <= ALPHA < 2 / 2**11 * len(comparisons)
    # The same budget for every searched loss: four settings on two seeds.
    # MiniRL's search is refused: it has no staleness.
    budget = Counter(run.loss for run in third.search(False) if run.loss != "minirl")
    assert set(budget.values()) == {8} and all(name.endswith(" tuned") for name in budget)


def test_the_columns_say_what_is_complete_and_what_it_cost(
    grid: tuple[list[GridRun], list[dict[str, Any]]],
) -> None:
    runs, rows = grid
    search = [_run("grpo", seed, "search") for seed in (100, 101)]
    text = format_columns([*rows, _row(search[0], 0.5), _row(search[1], 0.5)], [*search, *runs, runs[0]])
    assert text.splitlines()[2:] == [
        "| search on rare_words | 2 of 2 | yes | 0.20 |",
        "| rare_words, staleness 8 | 59 of 60 | no | 5.90 |",
    ]
