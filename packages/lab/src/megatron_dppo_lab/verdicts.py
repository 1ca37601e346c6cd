"""Verdicts on claims: two losses separate if their bands over seeds do not overlap.

If bands overlap because of the spread over seeds, a difference with the same sign on every seed has its own verdict.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from megatron_dppo_lab.experiment import Claim, shown_scores
from megatron_dppo_lab.statistics import SCORES, Band, Cell, Row, bands

_MIN_SEEDS = 3
"""Fewest seeds for a verdict."""
_MIN_PAIRS = 5
"""Fewest common seeds for a verdict by sign: five have the same sign by chance in 1 of 16 cases."""
_VERDICTS = ("holds", "reversed", "higher on every seed", "lower on every seed", "open", "too few seeds")


def format_verdicts(rows: Iterable[Row], claims: Sequence[Claim]) -> str:
    """Format the conditions in which each claim holds, and how often each pair of losses separates by each score."""
    row_list = list(rows)
    by_score = {name: bands(row_list, SCORES[name]) for name in shown_scores(claims)}
    parts = [_format_claim(claim, by_score[claim.score]) for claim in claims]
    pairs = [_format_pairs(name, by_cell) for name, by_cell in by_score.items()]
    return "\n".join([*parts, "", *pairs])


def judge(better: Band, worse: Band) -> str:
    """Return one of ``_VERDICTS``: by the bands if they do not overlap, else by the differences on common seeds."""
    if min(better.count, worse.count) < _MIN_SEEDS:
        return "too few seeds"
    if better.above(worse) or worse.above(better):
        return "holds" if better.above(worse) else "reversed"
    apart = better.minus(worse)
    if apart is None or apart.count < _MIN_PAIRS or apart.low <= 0 <= apart.high:
        return "open"
    return "higher on every seed" if apart.low > 0 else "lower on every seed"


def _format_claim(claim: Claim, by_cell: Mapping[Cell, Band]) -> str:
    by_verdict: dict[str, list[str]] = {}
    for (task, mismatch, loss), better in by_cell.items():
        worse = by_cell.get((task, mismatch, claim.worse))
        if loss == claim.better and worse is not None:
            apart = better.minus(worse)
            pairs = "" if apart is None else f" ({apart.mean:+.3f} [{apart.low:+.3f}, {apart.high:+.3f}])"
            text = f"{task}/{mismatch} {better} against {worse}{pairs}"
            by_verdict.setdefault(judge(better, worse), []).append(text)
    if not by_verdict:
        return f"- {claim.text}: not measured."
    total = sum(map(len, by_verdict.values()))
    head = f"- {claim.text} (`{claim.better}` above `{claim.worse}`, {claim.score}; {total} conditions; in brackets"
    head += " differences on the same seed):"
    lines = [
        f"  - {verdict} in {len(by_verdict[verdict])}: {'; '.join(by_verdict[verdict])}"
        for verdict in _VERDICTS
        if verdict in by_verdict
    ]
    return "\n".join([head, *lines])


def _format_pairs(score: str, by_cell: Mapping[Cell, Band]) -> str:
    losses = list(dict.fromkeys(loss for _, _, loss in by_cell))
    conditions = list(dict.fromkeys((task, mismatch) for task, mismatch, _ in by_cell))
    legend = "first above : second above : bands overlap; of the last first : second higher on every seed"
    lines = [f"Pairs by `{score}` ({legend}):"]
    for one, two in combinations(losses, 2):
        counts = dict.fromkeys(_VERDICTS, 0)
        for condition in conditions:
            a, b = by_cell.get((*condition, one)), by_cell.get((*condition, two))
            if a is not None and b is not None:
                counts[judge(a, b)] += 1
        # In the order of ``_VERDICTS``.
        above, below, higher, lower, no_sign, _ = counts.values()
        if above or below or higher or lower:
            lines.append(f"- {one} / {two}: {above} : {below} : {higher + lower + no_sign}; {higher} : {lower}")
    return "\n".join(lines if len(lines) > 1 else [lines[0], "- none separates"])
