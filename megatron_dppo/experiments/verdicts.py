"""What the numbers say, and what they do not: two losses differ only where their bands over seeds do not overlap."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from megatron_dppo.experiments.experiment import Claim
from megatron_dppo.experiments.statistics import SCORES, Band, Cell, Row, bands

_FEWEST = 3
"""Seeds below which nothing is said to hold."""


def as_verdicts(rows: Iterable[Row], claims: Sequence[Claim]) -> str:
    """The claims with where they hold, are reversed, and are open; then how often each pair of losses separates."""
    of = {name: bands(rows, score) for rows in [list(rows)] for name, score in SCORES.items()}
    parts = [_claim(claim, of[claim.score]) for claim in claims]
    return "\n".join([*parts, "", *(_pairs(name, found) for name, found in of.items())])


def judge(better: Band, worse: Band) -> str:
    """``holds``, ``reversed``, ``open`` (the bands overlap), or ``too few seeds``."""
    if min(better.count, worse.count) < _FEWEST:
        return "too few seeds"
    return "holds" if better.above(worse) else "reversed" if worse.above(better) else "open"


def _claim(claim: Claim, found: Mapping[Cell, Band]) -> str:
    places: dict[str, list[str]] = {}
    for (task, mismatch, loss), better in found.items():
        worse = found.get((task, mismatch, claim.worse))
        if loss == claim.better and worse is not None:
            text = f"{task}/{mismatch} {better} against {worse}"
            places.setdefault(judge(better, worse), []).append(text)
    if not places:
        return f"- {claim.text}: not measured."
    total = sum(map(len, places.values()))
    head = f"- {claim.text} (`{claim.better}` above `{claim.worse}`, {claim.score}; {total} conditions):"
    told = ("holds", "reversed", "open", "too few seeds")
    return "\n".join([head, *(f"  - {w} in {len(places[w])}: {'; '.join(places[w])}" for w in told if w in places)])


def _pairs(score: str, found: Mapping[Cell, Band]) -> str:
    losses = list(dict.fromkeys(loss for _, _, loss in found))
    conditions = list(dict.fromkeys((task, mismatch) for task, mismatch, _ in found))
    lines = [f"Pairs by `{score}` (first above : second above : bands overlap):"]
    for one, two in combinations(losses, 2):
        counts = {"holds": 0, "reversed": 0, "open": 0}
        for condition in conditions:
            a, b = found.get((*condition, one)), found.get((*condition, two))
            if a is not None and b is not None and (verdict := judge(a, b)) in counts:
                counts[verdict] += 1
        if counts["holds"] or counts["reversed"]:
            lines.append(f"- {one} / {two}: {counts['holds']} : {counts['reversed']} : {counts['open']}")
    return "\n".join(lines if len(lines) > 1 else [lines[0], "- none separates"])
