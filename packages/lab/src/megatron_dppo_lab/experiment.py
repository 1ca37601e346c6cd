"""Declaration of an experiment: its runs and its claims."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from megatron_dppo_lab.catalogue import LOSSES, MISMATCHES, TASKS
from megatron_dppo_lab.grid import GridRun, Settings, merged, run_settings
from megatron_dppo_lab.statistics import TRAINING_SCORES, mean_reward

SEARCH_SEEDS = (100, 101)
"""Seeds of the search. No results are reported for them."""
SEEDS = (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class Claim:
    """Claim that one loss is better than another, judged from the rows."""

    text: str
    better: str
    worse: str
    score: str = "whole"


def shown_scores(claims: Iterable[Claim]) -> list[str]:
    """Return the names of the scores of the tables: those of every experiment, and others that a claim is about."""
    return list(dict.fromkeys((*TRAINING_SCORES, *(claim.score for claim in claims))))


@dataclass(frozen=True)
class Block:
    """Grid of losses and mismatches on one task."""

    task: str
    losses: Sequence[str]
    mismatches: Sequence[str]
    settings: Settings
    """Settings that override the task's."""
    searched_on: str = ""
    """Task on which the settings of its losses are searched. Empty for its own."""


@dataclass(frozen=True)
class Experiment:
    """A declared experiment."""

    name: str
    title: str
    blocks: Sequence[Block]
    quick: Sequence[Block]
    claims: Sequence[Claim] = ()
    seeds: Sequence[int] = SEEDS
    quick_seeds: Sequence[int] = SEEDS[:2]
    search_under: str = ""
    """Mismatch of the search for each loss's settings. Empty disables the search."""
    has_paired_tests: bool = False
    """True if the claims are judged by exact tests over paired seeds instead of bands."""

    def stages(self, quick: bool) -> list[Self]:
        """Return one experiment for each block. A stage ends, its search included, before the next one starts."""
        return [replace(self, blocks=(block,), quick=(block,)) for block in (self.quick if quick else self.blocks)]

    def search(self, quick: bool) -> list[GridRun]:
        """Return the runs of the search: every candidate of every loss on the search seeds. None with ``--quick``."""
        if not self.search_under or quick:
            return []
        searched = [
            replace(block, task=block.searched_on, settings={}) if block.searched_on else block for block in self.blocks
        ]
        runs = [
            self._run(block, loss, self.search_under, seed, chosen, phase="search", candidate=number)
            for block in searched
            for loss in block.losses
            for number, chosen in enumerate(LOSSES[loss].candidates)
            for seed in SEARCH_SEEDS
        ]
        # Blocks share the search of a loss. Losses whose candidates have one configuration keep their own labels.
        return list({(run.key, run.loss): run for run in runs}.values())

    def report(self, quick: bool, seeds: Sequence[int] | None, rows: Iterable[Mapping[str, object]]) -> list[GridRun]:
        """Return the reported runs, with the settings that the search chose.

        ``rows`` are those of the search. Without any, the losses have their defaults.
        """
        best = choose(rows)
        blocks, default_seeds = (self.quick, self.quick_seeds) if quick else (self.blocks, self.seeds)
        return [
            self._run(block, loss, mismatch, seed, candidates[number] if candidates else {}, candidate=number)
            for block in blocks
            for mismatch in block.mismatches
            for loss in block.losses
            for number, candidates in [best.get((block.searched_on or block.task, loss), (0, []))]
            for seed in seeds or default_seeds
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
    """Return the candidate with the highest mean score, and all candidates, by task and loss."""
    # Of equal means, the first candidate wins.
    return {
        (task, loss): (max(means, key=lambda number: (means[number], -number)), LOSSES[loss].candidates)
        for (task, loss), means in search_scores(rows).items()
    }


def search_scores(rows: Iterable[Mapping[str, object]]) -> dict[tuple[str, str], dict[int, float]]:
    """Return the mean score of each candidate by task and loss."""
    scores: dict[tuple[str, str], dict[int, list[float]]] = {}
    for row in rows:
        if row["phase"] == "search":
            by_candidate = scores.setdefault((str(row["task"]), str(row["loss"])), {})
            by_candidate.setdefault(int(str(row["candidate"])), []).append(mean_reward(row))
    return {
        loss: {number: sum(values) / len(values) for number, values in by_candidate.items()}
        for loss, by_candidate in scores.items()
    }
