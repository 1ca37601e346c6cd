"""Statistics over seeds: bands of scores, and their comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Row = Mapping[str, Any]
Score = Callable[[Row], float]


@dataclass(frozen=True)
class Band:
    """Mean and range of a score over seeds."""

    mean: float
    low: float
    high: float
    count: int
    by_seed: Mapping[int, float] = field(default_factory=dict, compare=False, repr=False)
    """Values by seed. Empty for values that do not belong to seeds."""

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"

    def above(self, other: Band) -> bool:
        """Return True if this band lies entirely above the other one."""
        return self.low > other.high

    def minus(self, other: Band) -> Band | None:
        """Return the band of differences on common seeds, which share base model and prompts for all losses."""
        both = self.by_seed.keys() & other.by_seed.keys()
        return band(self.by_seed[seed] - other.by_seed[seed] for seed in sorted(both))


def band(values: Iterable[float]) -> Band | None:
    """Return mean, minimum and maximum. None if there are no values."""
    listed = list(values)
    if not listed:
        return None
    return Band(sum(listed) / len(listed), min(listed), max(listed), len(listed))


def series(row: Row, metric: str) -> list[float]:
    """Return a metric over the steps. A stopped run has fewer."""
    return list(row["curves"].get(metric, []))


def mean_reward(row: Row) -> float:
    """Return the mean training reward over all steps."""
    return _mean(_rewards(row))


def final(row: Row) -> float:
    """Return the mean training reward over the last quarter of the steps."""
    rewards = _rewards(row)
    return _mean(rewards[-max(1, len(rewards) // 4) :])


def held_out(row: Row) -> float:
    """Return the mean accuracy of the evaluations after the first. Missing ones of a stopped run count as 0."""
    settings = row["settings"]
    count = settings["run"]["num_steps"] // settings["eval"]["every"]
    accuracies = series(row, "eval/accuracy")[1:]
    return _mean(accuracies + [0.0] * (count - len(accuracies)))


def masked(row: Row) -> float:
    """Return the mean fraction of masked tokens among those with an advantage."""
    return _mean(series(row, "train/mask_fraction"))


def _rewards(row: Row) -> list[float]:
    """Return training rewards. Missing steps of a stopped run count as 0."""
    rewards = series(row, "rollout/reward")
    return rewards + [0.0] * (row["settings"]["run"]["num_steps"] - len(rewards))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


SCORES: Mapping[str, Score] = {"whole": mean_reward, "final": final, "held_out": held_out}
"""Scores by name. Higher is better."""
TRAINING_SCORES = ("whole", "final")
"""Scores that every table has. With old rollouts they measure an earlier policy."""

Cell = tuple[str, str, str]
"""Task, mismatch and loss."""


def cells(rows: Iterable[Row], phase: str = "report") -> dict[Cell, list[Row]]:
    """Return the rows of each cell, sorted by seed."""
    by_cell: dict[Cell, list[Row]] = {}
    for row in sorted(rows, key=lambda row: int(row["seed"])):
        if row["phase"] == phase:
            by_cell.setdefault((row["task"], row["mismatch"], row["loss"]), []).append(row)
    return by_cell


def bands(rows: Iterable[Row], score: Score) -> dict[Cell, Band]:
    """Return the band of each cell."""
    result = {}
    for cell, cell_rows in cells(rows).items():
        values = {int(row["seed"]): score(row) for row in cell_rows}
        if (cell_band := band(values.values())) is not None:
            result[cell] = replace(cell_band, by_seed=values)
    return result
