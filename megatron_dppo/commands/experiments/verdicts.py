"""What the numbers say, and what they do not: two losses separate where their bands over seeds do not overlap.

Where they overlap, seeds themselves may be what spreads: a difference that has one sign on every seed is told apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from megatron_dppo.commands.experiments.experiment import Claim
from megatron_dppo.commands.experiments.statistics import SCORES, Band, Cell, Row, bands

_FEWEST, _FEWEST_PAIRS = 3, 5
"""Seeds below which nothing is said to hold, and nothing of differences on the same seed: five have one sign by chance
once in 16 times."""
_TOLD = ("holds", "reversed", "higher on every seed", "lower on every seed", "open", "too few seeds")


def as_verdicts(rows: Iterable[Row], claims: Sequence[Claim]) -> str:
    """The claims with where they hold, are reversed, and are open; then how often each pair of losses separates."""
    of = {name: bands(rows, score) for rows in [list(rows)] for name, score in SCORES.items()}
    parts = [_claim(claim, of[claim.score]) for claim in claims]
    return "\n".join([*parts, "", *(_pairs(name, found) for name, found in of.items())])


def judge(better: Band, worse: Band) -> str:
    """One of ``_TOLD``: ``holds`` or ``reversed`` where the bands do not overlap, else what the same seeds say."""
    if min(better.count, worse.count) < _FEWEST:
        return "too few seeds"
    if better.above(worse) or worse.above(better):
        return "holds" if better.above(worse) else "reversed"
    apart = better.minus(worse)
    if apart is None or apart.count < _FEWEST_PAIRS or apart.low <= 0 <= apart.high:
        return "open"
    return "higher on every seed" if apart.low > 0 else "lower on every seed"


def _claim(claim: Claim, found: Mapping[Cell, Band]) -> str:
    places: dict[str, list[str]] = {}
    for (task, mismatch, loss), better in found.items():
        worse = found.get((task, mismatch, claim.worse))
        if loss == claim.better and worse is not None:
            apart = better.minus(worse)
            pairs = "" if apart is None else f" ({apart.mean:+.3f} [{apart.low:+.3f}, {apart.high:+.3f}])"
            text = f"{task}/{mismatch} {better} against {worse}{pairs}"
            places.setdefault(judge(better, worse), []).append(text)
    if not places:
        return f"- {claim.text}: not measured."
    total = sum(map(len, places.values()))
    head = f"- {claim.text} (`{claim.better}` above `{claim.worse}`, {claim.score}; {total} conditions; in brackets"
    head += " differences on the same seed):"
    return "\n".join([head, *(f"  - {w} in {len(places[w])}: {'; '.join(places[w])}" for w in _TOLD if w in places)])


def _pairs(score: str, found: Mapping[Cell, Band]) -> str:
    losses = list(dict.fromkeys(loss for _, _, loss in found))
    conditions = list(dict.fromkeys((task, mismatch) for task, mismatch, _ in found))
    told = "first above : second above : bands overlap; of the last first : second higher on every seed"
    lines = [f"Pairs by `{score}` ({told}):"]
    for one, two in combinations(losses, 2):
        counts = dict.fromkeys(_TOLD, 0)
        for condition in conditions:
            a, b = found.get((*condition, one)), found.get((*condition, two))
            if a is not None and b is not None:
                counts[judge(a, b)] += 1
        above, below, higher, lower, no_sign, _ = counts.values()
        if above or below or higher or lower:
            lines.append(f"- {one} / {two}: {above} : {below} : {higher + lower + no_sign}; {higher} : {lower}")
    return "\n".join(lines if len(lines) > 1 else [lines[0], "- none separates"])
