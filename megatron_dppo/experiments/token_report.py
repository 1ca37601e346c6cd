"""Measurements of single tokens as tables and a page of figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_dppo.experiments.statistics import Row, band, cells
from megatron_dppo.experiments.tokens import RULES

_RATIO = ("5 %", "median", "95 %")


def token_tables(rows: Iterable[Row]) -> str:
    """One table a mismatch: bins of mu down, what was found in them across, mean over seeds."""
    parts = []
    for (task, mismatch, _), of in cells(rows).items():
        found = [row["tokens"] for row in of if row["tokens"]]
        if found:
            parts.append(f"### {task}, {mismatch}: tokens by mu ({len(found)} seeds)\n\n{_bins(found)}")
            parts += [_words(name, found) for name in RULES if name in found[0]]
    return "\n\n".join(parts)


def _bins(found: Sequence[Any]) -> str:
    rules = [name for name in RULES if name in found[0]]
    head = [
        "mu",
        "tokens",
        "mean abs(pi - mu)",
        *(f"ratio {name}" for name in _RATIO),
        *(f"masked by {r}" for r in rules),
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for place, first in enumerate(found[0]["bins"]):
        bins = [f["bins"][place] for f in found if f["bins"][place]["tokens"]]
        if not bins:
            continue
        values = [
            _over([b["tv"] for b in bins], ".1e"),
            *(_over([b["ratio"][i] for b in bins], ".3f") for i in range(3)),
        ]
        masked = [[s for f in found if (s := f[rule]["bins"][place]) is not None] for rule in rules]
        shares = [_over(of, ".1%") if of else "-" for of in masked]
        count = sum(b["tokens"] for b in bins)
        lines.append("| " + " | ".join([f"{first['low']:g} to {first['high']:g}", str(count), *values, *shares]) + " |")
    return "\n".join(lines)


def _over(values: Sequence[float], form: str) -> str:
    found = band(values)
    assert found is not None
    return f"{found.mean:{form}} [{found.low:{form}}, {found.high:{form}}]"


def _words(rule: str, found: Sequence[Any]) -> str:
    """The words that a rule masked most, of the first seed."""
    share = _over([f[rule]["share"] or 0.0 for f in found], ".1%")
    words = ", ".join(f"{w['word']} ({w['masked']}, mu {w['mean_mu']:.3f})" for w in found[0][rule]["words"])
    return f"`{rule}` masks {share} of the tokens with an advantage; most often, in the first seed: {words or 'none'}."


def write_token_page(rows: Iterable[Row], picture: Path, title: str) -> None:
    """Ratio (5 % to 95 %) and |pi - mu| over mu, one line a mismatch and seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for color, ((_, mismatch, _), of) in zip(plt.get_cmap("tab10").colors, cells(rows).items(), strict=False):
        for number, row in enumerate(of):
            bins = [b for b in row["tokens"].get("bins", []) if b["tokens"]]
            mu = [(max(b["low"], 1e-5) * b["high"]) ** 0.5 for b in bins]
            low, high = ([b["ratio"][i] for b in bins] for i in (0, 2))
            label = mismatch if number == 0 else None
            left.fill_between(mu, low, high, color=color, alpha=0.2, label=label)
            right.plot(mu, [b["tv"] for b in bins], color=color, marker=".", label=label)
    for axis, name in ((left, "pi / mu, 5 % to 95 %"), (right, "mean |pi - mu|")):
        axis.set(xscale="log", yscale="log", xlabel="mu", title=name)
        axis.legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(picture, dpi=110)
    plt.close(figure)
