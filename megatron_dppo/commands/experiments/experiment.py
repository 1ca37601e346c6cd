"""What an experiment is: which runs, and what is told of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_dppo.commands.experiments.catalogue import LOSSES, MISMATCHES, TASKS
from megatron_dppo.commands.experiments.grid import GridRun, Settings, merged, run_settings
from megatron_dppo.commands.experiments.statistics import band, whole

SEARCH_SEEDS = (100, 101)
"""No result is reported of these."""
SEEDS = (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class Claim:
    """That one loss is better than another one, to be judged from the rows."""

    text: str
    better: str
    worse: str
    score: str = "whole"


@dataclass(frozen=True)
class Block:
    """Losses x mismatches on one task."""

    task: str
    losses: Sequence[str]
    mismatches: Sequence[str]
    settings: Settings
    """over the task's"""
    searched_on: str = ""
    """the task on which its losses' settings are searched; empty = its own"""


@dataclass(frozen=True)
class Experiment:
    """A declared experiment."""

    name: str
    title: str
    blocks: Sequence[Block]
    quick: Sequence[Block]
    """with ``--quick``"""
    claims: Sequence[Claim] = ()
    quick_seeds: Sequence[int] = SEEDS[:2]
    search_under: str = ""
    """the mismatch under which each loss's candidates are tried; empty = nothing is searched"""

    def search(self, quick: bool) -> list[GridRun]:
        """The runs of the search: every candidate of every loss on the search's seeds; none with ``--quick``."""
        if not self.search_under or quick:
            return []
        return [
            self._run(block, loss, self.search_under, seed, chosen, phase="search", candidate=number)
            for block in self.blocks
            if block.searched_on in ("", block.task)
            for loss in block.losses
            for number, chosen in enumerate(LOSSES[loss].candidates)
            for seed in SEARCH_SEEDS
        ]

    def report(self, quick: bool, seeds: Sequence[int] | None, rows: Iterable[Mapping[str, object]]) -> list[GridRun]:
        """The runs whose results are reported, by what the search's rows say.

        Args:
            quick: a few of them.
            seeds: of the runs; None = the experiment's.
            rows: of all runs of the search; empty = the defaults of the losses.
        """
        best = choose(rows)
        blocks, usual = (self.quick, self.quick_seeds) if quick else (self.blocks, SEEDS)
        return [
            self._run(block, loss, mismatch, seed, candidates[number] if candidates else {}, candidate=number)
            for block in blocks
            for mismatch in block.mismatches
            for loss in block.losses
            for number, candidates in [best.get((block.searched_on or block.task, loss), (0, []))]
            for seed in seeds or usual
        ]

    def _run(
        self,
        block: Block,
        loss: str,
        mismatch: str,
        seed: int,
        chosen: Settings,
        *,
        phase: str = "report",
        candidate: int = 0,
    ) -> GridRun:
        base = merged(TASKS[block.task], block.settings)
        settings = run_settings(base, LOSSES[loss], MISMATCHES[mismatch], seed, chosen)
        return GridRun(block.task, loss, mismatch, seed, settings, phase=phase, candidate=candidate)


def choose(rows: Iterable[Mapping[str, object]]) -> dict[tuple[str, str], tuple[int, Sequence[Settings]]]:
    """(task, loss) -> the candidate with the highest mean score over the search's seeds, and all candidates."""
    scores: dict[tuple[str, str], dict[int, list[float]]] = {}
    for row in rows:
        if row["phase"] == "search":
            place = scores.setdefault((str(row["task"]), str(row["loss"])), {})
            place.setdefault(int(str(row["candidate"])), []).append(whole(row))
    best = {}
    for (task, loss), of in scores.items():
        means = {number: found.mean for number, values in of.items() if (found := band(values)) is not None}
        best[task, loss] = max(means, key=lambda number: (means[number], -number)), LOSSES[loss].candidates
    return best
