"""Rows as one page of figures: reward over the steps, mean and least-to-largest band over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from megatron_dppo.experiments.statistics import Row, band, cells, series

_COLUMNS = 3


def write_page(rows: Iterable[Row], picture: Path, title: str) -> None:
    """Draw the training reward: one panel a task and mismatch, one line and band a loss."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = cells(rows)
    panels = list(dict.fromkeys((task, mismatch) for task, mismatch, _ in found))
    losses = list(dict.fromkeys(loss for _, _, loss in found))
    colors = dict(zip(losses, plt.get_cmap("tab20").colors * 2, strict=False))
    height = ceil(len(panels) / _COLUMNS)
    style = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}
    with plt.rc_context({**style, "font.size": 8}):
        size = (4.2 * _COLUMNS, 2.6 * height + 1)
        figure, axes = plt.subplots(height, _COLUMNS, figsize=size, layout="constrained", squeeze=False)
        for axis, (task, mismatch) in zip(axes.flat, panels, strict=False):
            for loss in losses:
                if of := found.get((task, mismatch, loss)):
                    _draw(axis, [series(row, "rollout/reward") for row in of], loss, colors[loss])
            axis.set_title(f"{task}, {mismatch}", loc="left")
            axis.set_xlabel("rollout step")
        for axis in list(axes.flat)[len(panels) :]:
            axis.set_visible(False)
        handles = {label: h for axis in axes.flat for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6, frameon=False)
        figure.suptitle(f"{title} (training reward; mean, least and largest over seeds)")
        figure.savefig(picture, dpi=110)
        plt.close(figure)


def _draw(axis: Any, curves: Sequence[Sequence[float]], label: str, color: Any) -> None:
    steps = range(1, max(map(len, curves), default=0) + 1)
    over = [band(curve[i - 1] for curve in curves if len(curve) >= i) for i in steps]
    known = [b for b in over if b is not None]
    axis.plot(steps, [b.mean for b in known], label=label, color=color, linewidth=1.2)
    axis.fill_between(steps, [b.low for b in known], [b.high for b in known], color=color, alpha=0.15, linewidth=0)
