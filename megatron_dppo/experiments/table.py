"""Rows as one table of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_dppo.experiments.grid import Run
from megatron_dppo.experiments.statistics import SCORES, Row, band, bands, cells, masked

_MEANINGS = {
    "whole": "mean training reward over all steps",
    "final": "mean training reward over the last quarter of the steps",
}


def as_table(rows: Iterable[Row], runs: Sequence[Run]) -> str:
    """One table a task and score: losses down, mismatches across; ``mean [least, largest]`` over seeds.

    Args:
        rows: of finished runs.
        runs: of the whole grid, for what is missing or refused.
    """
    found = list(rows)
    parts = []
    for task in dict.fromkeys(run.task for run in runs):
        mine = [run for run in runs if run.task == task and run.phase == "report"]
        for name, score in SCORES.items():
            of = bands(found, score)
            texts = {cell: f"{value} ({value.count})" for cell, value in of.items()}
            parts.append(f"### {task}: {_MEANINGS[name]} (seeds)\n\n{_grid(mine, texts)}")
        shares = {cell: f"{m.mean:.1%}" for cell, of_cell in cells(found).items() if (m := band(map(masked, of_cell)))}
        parts.append(f"### {task}: masked tokens\n\n{_grid(mine, shares)}")
    return "\n\n".join([*parts, notes(found, runs)])


def _grid(runs: Sequence[Run], texts: dict[tuple[str, str, str], str]) -> str:
    mismatches = list(dict.fromkeys(run.mismatch for run in runs))
    refused = {(run.task, run.mismatch, run.loss) for run in runs if run.refusal}
    lines = ["| loss | " + " | ".join(mismatches) + " |", "|---" * (len(mismatches) + 1) + "|"]
    for loss in dict.fromkeys(run.loss for run in runs):
        of = [(runs[0].task, mismatch, loss) for mismatch in mismatches]
        entries = [texts.get(cell, "refused" if cell in refused else "-") for cell in of]
        lines.append(f"| {loss} | " + " | ".join(entries) + " |")
    return "\n".join(lines)


def notes(rows: Sequence[Row], runs: Sequence[Run]) -> str:
    """How much is done, what it took, what was refused and what stopped."""
    keys = {row["key"] for row in rows}
    wanted = {run.key for run in runs if not run.refusal}
    cpu = sum(row["cpu_seconds"] for row in rows)
    lines = [f"{len(keys & wanted)} of {len(wanted)} runs; {cpu / 3600:.2f} CPU hours without base models."]
    lines += [
        f"`{loss}`: refused, {reason}" for loss, reason in dict.fromkeys((r.loss, r.refusal) for r in runs if r.refusal)
    ]
    stopped = [row for row in rows if row["error"]]
    lines += [f"{r['task']}, {r['mismatch']}, {r['loss']}, seed {r['seed']}: {r['error'][:120]}" for r in stopped]
    return "\n".join(f"- {line}" for line in lines)
