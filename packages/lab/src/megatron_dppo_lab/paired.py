"""Exact tests over paired seeds, corrected for the number of declared comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose
from statistics import fmean, stdev
from typing import Any

from megatron_dppo_lab.experiment import Claim
from megatron_dppo_lab.grid import GridRun
from megatron_dppo_lab.statistics import SCORES, Cell, Row, band, cells

ALPHA = 0.05
"""Largest probability of any false verdict in an experiment."""
UNDECIDED = "cannot be told apart"
"""Verdict on a finished comparison whose corrected p is larger."""
_MAX_SEEDS = 20
_TIE = 1e-9
"""Relative tolerance for equal sums, which rounding makes unequal."""


@dataclass(frozen=True)
class Comparison:
    """A claim in one condition."""

    claim: Claim
    task: str
    mismatch: str
    seeds: Sequence[int]
    differences: Sequence[float]
    """Score of ``claim.better`` minus that of ``claim.worse``, for each seed with both runs."""
    settings: tuple[str, str] = ("", "")

    @property
    def is_complete(self) -> bool:
        """True if every declared seed has both runs."""
        return len(self.differences) == len(self.seeds)

    @property
    def p_value(self) -> float:
        """P-value of the sign-flip test. 1 if seeds are missing."""
        return sign_flip_p_value(self.differences) if self.is_complete else 1.0

    def reversed(self) -> Comparison:
        """Return the comparison of the second loss against the first."""
        claim = replace(self.claim, better=self.claim.worse, worse=self.claim.better)
        differences = [-difference for difference in self.differences]
        return replace(self, claim=claim, differences=differences, settings=self.settings[::-1])


def sign_flip_p_value(differences: Sequence[float]) -> float:
    """Return the exact two-sided p-value of the sign-flip permutation test for a mean of 0.

    Under the null hypothesis each paired difference is as likely as its negative. The p-value is the share of all 2^n
    sign assignments whose sum is at least as far from 0 as the observed one. With n seeds it is at least 2 / 2^n.
    """
    if not 1 <= len(differences) <= _MAX_SEEDS:
        raise ValueError(f"{len(differences)} paired differences; expected 1 to {_MAX_SEEDS}")
    sums = [0.0]
    for difference in differences:
        sums = [total + signed for total in sums for signed in (difference, -difference)]
    limit = abs(sum(differences)) - _TIE * sum(map(abs, differences))
    return sum(abs(total) >= limit for total in sums) / len(sums)


def holm(p_values: Sequence[float], total: int) -> list[float]:
    """Return p-values adjusted by Holm's step-down method.

    ``total`` is the number of declared comparisons. Unfinished ones count as p = 1, so that a verdict never changes
    when they are finished.
    """
    if total < len(p_values):
        raise ValueError(f"{len(p_values)} p-values of {total} comparisons; expected at most {total}")
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (total - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def effect_size(differences: Sequence[float]) -> float | None:
    """Return the mean in units of the standard deviation over seeds (d_z). None without a deviation."""
    if len(differences) < 2:
        return None
    deviation = stdev(differences)
    return None if isclose(deviation, 0.0, abs_tol=1e-12) else fmean(differences) / deviation


def without_open_searches(rows: Sequence[Row], runs: Sequence[GridRun]) -> list[Row]:
    """Return the rows without those of losses whose search is unfinished, since it may choose other settings."""
    finished = {row["key"] for row in rows}
    searching = {run.loss for run in runs if run.phase == "search" and not run.refusal and run.key not in finished}
    return [row for row in rows if row["loss"] not in searching]


def compare(claims: Sequence[Claim], rows: Sequence[Row], runs: Sequence[GridRun]) -> list[Comparison]:
    """Return every claim in every condition that has both of its losses.

    Rows of losses whose search is unfinished do not count. Refused runs are in no comparison.
    """
    declared: dict[Cell, dict[int, GridRun]] = {}
    for run in runs:
        if run.phase == "report" and not run.refusal:
            declared.setdefault((run.task, run.mismatch, run.loss), {})[run.seed] = run
    by_cell = cells(without_open_searches(rows, runs))
    finished = {cell: {int(row["seed"]): row for row in cell_rows} for cell, cell_rows in by_cell.items()}
    comparisons = []
    for claim in claims:
        for (task, mismatch, loss), planned in declared.items():
            worse = (task, mismatch, claim.worse)
            if loss != claim.better or worse not in declared:
                continue
            first, second = finished.get((task, mismatch, loss), {}), finished.get(worse, {})
            seeds = sorted(planned.keys() & declared[worse].keys())
            score = SCORES[claim.score]
            comparisons.append(
                Comparison(
                    claim,
                    task,
                    mismatch,
                    seeds,
                    [score(first[seed]) - score(second[seed]) for seed in seeds if seed in first and seed in second],
                    (_format_loss(planned), _format_loss(declared[worse])),
                )
            )
    return comparisons


def format_comparisons(comparisons: Sequence[Comparison]) -> str:
    """Format one line for each comparison: verdict, both losses with their settings, effect and p-values."""
    total = len(comparisons)
    adjusted = holm([each.p_value for each in comparisons], total)
    lines = [
        f"{total} declared comparisons. Sign-flip test over paired seeds, exact and two-sided; p corrected by Holm's "
        f"method for all {total}, finished or not. A verdict needs a corrected p of at most {ALPHA}."
    ]
    for count in sorted({len(each.seeds) for each in comparisons}):
        least = 2 / 2**count * total
        reach = "a verdict is possible" if least <= ALPHA else "no verdict is possible"
        lines.append(f"With {count} seeds the least corrected p is {min(1.0, least):.2g}: {reach}.")
    lines += [
        "",
        "| claim | condition | verdict | difference [least, largest] | d_z | p | corrected |",
        "|---" * 7 + "|",
    ]
    lines += [_format_comparison(each, p) for each, p in zip(comparisons, adjusted, strict=True)]
    return "\n".join(lines)


def judge_pair(comparison: Comparison, corrected: float) -> str:
    """Return ``above``, ``below``, ``cannot be told apart``, or how many seeds are finished."""
    if not comparison.is_complete:
        return f"{len(comparison.differences)} of {len(comparison.seeds)} seeds"
    if corrected > ALPHA:
        return UNDECIDED
    return "above" if sum(comparison.differences) > 0 else "below"


def _format_comparison(comparison: Comparison, corrected: float) -> str:
    claim = comparison.claim
    better, worse = comparison.settings
    text = f"{claim.text}: {claim.better} ({better}) against {claim.worse} ({worse}), `{claim.score}`"
    entries = [text, f"{comparison.task}, {comparison.mismatch}", judge_pair(comparison, corrected)]
    apart = band(comparison.differences)
    size = effect_size(comparison.differences)
    entries.append("-" if apart is None else f"{apart.mean:+.3f} [{apart.low:+.3f}, {apart.high:+.3f}]")
    entries.append("-" if size is None else f"{size:+.1f}")
    entries += [f"{comparison.p_value:.2g}", f"{corrected:.2g}"] if comparison.is_complete else ["-", "-"]
    return "| " + " | ".join(entries) + " |"


def _format_loss(planned: Mapping[int, GridRun]) -> str:
    """Format the section ``[loss]`` of a cell, whose seeds have the same one."""
    table: dict[str, Any] = dict(next(iter(planned.values())).settings["loss"])
    low, high = (table.get(f"divergence_threshold_{side}") for side in ("low", "high"))
    if low is not None and low == high:
        table = {key: value for key, value in table.items() if not key.startswith("divergence_threshold_")}
        table["delta"] = low
    return ", ".join([str(table.pop("name")), *(f"{key} {value}" for key, value in table.items())])


def format_columns(rows: Sequence[Row], runs: Sequence[GridRun]) -> str:
    """Format finished runs and CPU hours of the search and of each column."""
    by_key = {row["key"]: row for row in rows}
    columns: dict[str, set[str]] = {}
    for run in runs:
        if not run.refusal:
            name = f"search on {run.task}" if run.phase == "search" else f"{run.task}, {run.mismatch}"
            columns.setdefault(name, set()).add(run.key)
    lines = ["| column | finished runs | complete | CPU hours |", "|---|---|---|---|"]
    for name, keys in columns.items():
        finished = keys & by_key.keys()
        hours = sum(by_key[key]["cpu_seconds"] for key in finished) / 3600
        complete = "yes" if finished == keys else "no"
        lines.append(f"| {name} | {len(finished)} of {len(keys)} | {complete} | {hours:.2f} |")
    return "\n".join(lines)
