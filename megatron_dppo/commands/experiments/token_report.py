"""Measurements of single tokens as tables and a page of figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from megatron_dppo.commands.experiments.statistics import Row, band, cells
from megatron_dppo.commands.experiments.tokens import RULES

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
    """Ratio, |pi - mu| and, where rules were asked, what they mask, by mu: means over seeds, with least and largest."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    measured = {
        mismatch: found
        for (_, mismatch, _), of in cells(rows).items()
        if (found := [row["tokens"] for row in of if row["tokens"]])
    }
    first = next(iter(measured.values()), [])
    rules = [name for name in RULES if first and name in first[0]]
    figure, axes = plt.subplots(1, 3 if rules else 2, figsize=(15 if rules else 11, 4), layout="constrained")
    for color, (mismatch, found) in zip(plt.get_cmap("tab10").colors, measured.items(), strict=False):
        low, median, high = (_line(found, partial(_ratio, i)) for i in range(3))
        axes[0].plot(median.mu, median.mean, color=color, label=mismatch)
        axes[0].fill_between(low.mu, low.mean, high.mean, color=color, alpha=0.15)
        _draw(axes[1], _line(found, _difference), color, mismatch)
    for color, rule in zip(plt.get_cmap("Dark2").colors, rules, strict=False):
        _draw(axes[2], _line(first, partial(_masked, rule)), color, rule)
    for axis, name in zip(axes, ("pi / mu: 5 %, median, 95 %", "mean |pi - mu|", "masked"), strict=False):
        axis.set(xscale="log", xlabel="mu", title=name, **({} if name == "masked" else {"yscale": "log"}))
        axis.legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


class _Line(NamedTuple):
    mu: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def _ratio(place: int, found: Any, at: int) -> float:
    return float(found["bins"][at]["ratio"][place])


def _difference(found: Any, at: int) -> float:
    return float(found["bins"][at]["tv"])


def _masked(rule: str, found: Any, at: int) -> float | None:
    share: float | None = found[rule]["bins"][at]
    return share


def _line(found: Sequence[Any], value: Callable[[Any, int], float | None]) -> _Line:
    """A value of each seed by bin; a bin that most seeds lack has a few tokens and is left out."""
    points = []
    for at, first in enumerate(found[0]["bins"]):
        seeds = [f for f in found if f["bins"][at]["tokens"]]
        over = band([known for f in seeds if (known := value(f, at)) is not None])
        if over is not None and 2 * len(seeds) > len(found):
            points.append(((max(first["low"], 1e-5) * first["high"]) ** 0.5, over.mean, over.low, over.high))
    return _Line(*(list(column) for column in zip(*points, strict=True))) if points else _Line([], [], [], [])


def _draw(axis: Any, line: _Line, color: Any, label: str) -> None:
    axis.plot(line.mu, line.mean, color=color, marker=".", label=label)
    axis.fill_between(line.mu, line.low, line.high, color=color, alpha=0.15)
