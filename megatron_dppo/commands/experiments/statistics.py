"""From rows to numbers over seeds: bands, and whether two of them overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Row = Mapping[str, Any]
Score = Callable[[Row], float]


@dataclass(frozen=True)
class Band:
    """A score over seeds."""

    mean: float
    low: float
    high: float
    count: int
    of_seed: Mapping[int, float] = field(default_factory=dict, compare=False, repr=False)
    """the values; empty = not of seeds"""

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"

    def above(self, other: Band) -> bool:
        """Whether all of it lies above all of the other one."""
        return self.low > other.high

    def minus(self, other: Band) -> Band | None:
        """The differences on the seeds that both have: a seed's base model and prompts are the same for all losses."""
        both = self.of_seed.keys() & other.of_seed.keys()
        return band(self.of_seed[seed] - other.of_seed[seed] for seed in sorted(both))


def band(values: Iterable[float]) -> Band | None:
    """Mean, least and largest of the values; None = there are none."""
    found = list(values)
    if not found:
        return None
    return Band(sum(found) / len(found), min(found), max(found), len(found))


def series(row: Row, metric: str) -> list[float]:
    """A metric over the steps; of a run that was stopped only the steps that it did."""
    return list(row["curves"].get(metric, []))


def whole(row: Row) -> float:
    """Mean training reward over all steps: how fast, and how far."""
    return _mean(_rewards(row))


def final(row: Row) -> float:
    """Mean training reward over the last quarter of the steps: what is left at the end."""
    rewards = _rewards(row)
    return _mean(rewards[-max(1, len(rewards) // 4) :])


def masked(row: Row) -> float:
    """Mean share of tokens with an advantage that were masked."""
    return _mean(series(row, "train/mask_fraction"))


def _rewards(row: Row) -> list[float]:
    """Training rewards; the steps that a stopped run did not do count as 0, since it learned nothing in them."""
    rewards = series(row, "rollout/reward")
    return rewards + [0.0] * (row["settings"]["run"]["num_steps"] - len(rewards))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


SCORES: Mapping[str, Score] = {"whole": whole, "final": final}
"""Name -> score; more is better."""

Cell = tuple[str, str, str]
"""task, mismatch, loss"""


def cells(rows: Iterable[Row], phase: str = "report") -> dict[Cell, list[Row]]:
    """The rows of each cell, in the order of their seeds."""
    found: dict[Cell, list[Row]] = {}
    for row in sorted(rows, key=lambda row: int(row["seed"])):
        if row["phase"] == phase:
            found.setdefault((row["task"], row["mismatch"], row["loss"]), []).append(row)
    return found


def bands(rows: Iterable[Row], score: Score) -> dict[Cell, Band]:
    """The band of each cell."""
    result = {}
    for cell, of in cells(rows).items():
        values = {int(row["seed"]): score(row) for row in of}
        if (found := band(values.values())) is not None:
            result[cell] = replace(found, of_seed=values)
    return result
