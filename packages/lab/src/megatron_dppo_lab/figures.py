"""Figures and tables of experiments: reward over steps, mean and range over seeds."""

import json
from collections.abc import Iterable, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from megatron_dppo_lab.experiment import Claim, choose, search_scores, shown_scores
from megatron_dppo_lab.grid import GridRun
from megatron_dppo_lab.statistics import SCORES, Row, band, bands, cells, masked, series

_COLUMNS = 3


def write_page(rows: Iterable[Row], picture: Path, title: str) -> None:
    """Draw the training reward: one panel per task and mismatch, one line and band per loss."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    by_cell = cells(rows)
    panels = list(dict.fromkeys((task, mismatch) for task, mismatch, _ in by_cell))
    losses = list(dict.fromkeys(loss for _, _, loss in by_cell))
    colors = dict(zip(losses, plt.get_cmap("tab20").colors * 2, strict=False))
    height = ceil(len(panels) / _COLUMNS)
    style = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}
    with plt.rc_context({**style, "font.size": 8}):
        size = (4.2 * _COLUMNS, 2.6 * height + 1)
        figure, axes = plt.subplots(height, _COLUMNS, figsize=size, layout="constrained", squeeze=False)
        for axis, (task, mismatch) in zip(axes.flat, panels, strict=False):
            for loss in losses:
                if cell_rows := by_cell.get((task, mismatch, loss)):
                    _draw(axis, [series(row, "rollout/reward") for row in cell_rows], loss, colors[loss])
            axis.set_title(f"{task}, {mismatch}", loc="left")
            axis.set_xlabel("rollout step")
        for axis in list(axes.flat)[len(panels) :]:
            axis.set_visible(False)
        # One entry for each loss, of which every panel has a line.
        handles = {label: h for axis in axes.flat for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6, frameon=False)
        figure.suptitle(f"{title} (training reward; mean, least and largest over seeds)")
        figure.savefig(picture, dpi=110)
        plt.close(figure)


def _draw(axis: Any, curves: Sequence[Sequence[float]], label: str, color: Any) -> None:
    steps = range(1, max(map(len, curves), default=0) + 1)
    # A stopped run has fewer steps: later points are those of the other seeds.
    over = [band(curve[i - 1] for curve in curves if len(curve) >= i) for i in steps]
    known = [b for b in over if b is not None]
    axis.plot(steps, [b.mean for b in known], label=label, color=color, linewidth=1.2)
    axis.fill_between(steps, [b.low for b in known], [b.high for b in known], color=color, alpha=0.15, linewidth=0)


_MEANINGS = {
    "whole": "mean training reward over all steps",
    "final": "mean training reward over the last quarter of the steps",
    "held_out": "mean held-out accuracy over the evaluations after the first",
}


def format_results(rows: Iterable[Row], runs: Sequence[GridRun], claims: Sequence[Claim] = ()) -> str:
    """Format one table per task and score: a row per loss, a column per mismatch, ``mean [minimum, maximum]``.

    ``runs`` are all of the grid, to show missing and refused ones.
    """
    row_list = list(rows)
    parts = []
    for task in dict.fromkeys(run.task for run in runs):
        task_runs = [run for run in runs if run.task == task and run.phase == "report"]
        for name in shown_scores(claims):
            texts = {cell: f"{value} ({value.count})" for cell, value in bands(row_list, SCORES[name]).items()}
            parts.append(f"### {task}: {_MEANINGS[name]} (seeds)\n\n{_grid(task_runs, texts)}")
        shares = {
            cell: f"{m.mean:.1%}" for cell, cell_rows in cells(row_list).items() if (m := band(map(masked, cell_rows)))
        }
        parts.append(f"### {task}: masked tokens\n\n{_grid(task_runs, shares)}")
    return "\n\n".join([*parts, _notes(row_list, runs)])


def format_search(rows: Sequence[Row]) -> str:
    """Format the score of each candidate, the chosen one first. Empty without a search."""
    best = choose(rows)
    lines = []
    for (task, loss), means in search_scores(rows).items():
        number, candidates = best[task, loss]
        rejected = [f"{json.dumps(candidates[n])} {means[n]:.3f}" for n in sorted(means) if n != number]
        lines.append(f"- {task}, {loss}: {json.dumps(candidates[number])} {means[number]:.3f}")
        lines[-1] += f" (others: {'; '.join(rejected)})" if rejected else ""
    return "\n".join(lines)


def _grid(runs: Sequence[GridRun], texts: dict[tuple[str, str, str], str]) -> str:
    mismatches = list(dict.fromkeys(run.mismatch for run in runs))
    refused = {(run.task, run.mismatch, run.loss) for run in runs if run.refusal}
    lines = ["| loss | " + " | ".join(mismatches) + " |", "|---" * (len(mismatches) + 1) + "|"]
    for loss in dict.fromkeys(run.loss for run in runs):
        row_cells = [(runs[0].task, mismatch, loss) for mismatch in mismatches]
        entries = [texts.get(cell, "refused" if cell in refused else "-") for cell in row_cells]
        lines.append(f"| {loss} | " + " | ".join(entries) + " |")
    return "\n".join(lines)


def _notes(rows: Sequence[Row], runs: Sequence[GridRun]) -> str:
    # Two cells may share a run.
    seconds = {row["key"]: row["cpu_seconds"] for row in rows}
    wanted = {run.key for run in runs if not run.refusal}
    cpu = sum(seconds.values())
    lines = [f"{len(seconds.keys() & wanted)} of {len(wanted)} runs; {cpu / 3600:.2f} CPU hours without base models."]
    lines += [
        f"`{loss}`: refused, {reason}" for loss, reason in dict.fromkeys((r.loss, r.refusal) for r in runs if r.refusal)
    ]
    stopped = [row for row in rows if row["error"]]
    lines += [f"{r['task']}, {r['mismatch']}, {r['loss']}, seed {r['seed']}: {r['error'][:120]}" for r in stopped]
    return "\n".join(f"- {line}" for line in lines)
