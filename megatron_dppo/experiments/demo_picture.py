"""The picture of the demo: reward and masked tokens of each run, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_dppo.experiments.statistics import Row, series

_COLORS = ("#0072b2", "#e69f00", "#6e6e6e", "#009e73")
"""told apart also without seeing red and green as different"""
_PANELS = (
    ("rollout/reward", "training reward: share of right words"),
    ("train/mask_fraction", "share of tokens that the loss masks"),
)


def write_picture(rows: Sequence[Row], labels: Mapping[str, str], picture: Path) -> None:
    """Draw one line a run in each panel.

    Args:
        rows: of finished runs.
        labels: loss -> name in the legend.
        picture: the PNG file.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}
    with plt.rc_context({**style, "font.size": 9}):
        figure, axes = plt.subplots(1, len(_PANELS), figsize=(10, 3.8), layout="constrained")
        for axis, (metric, title) in zip(axes, _PANELS, strict=True):
            for row, color in zip(rows, _COLORS, strict=False):
                values = series(row, metric)
                axis.plot(range(1, len(values) + 1), values, color=color, linewidth=1.8, label=labels[row["loss"]])
            axis.set_title(title, loc="left")
            axis.set_xlabel("rollout step")
            axis.set_ylim(0, 1)
        handles, names = axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=len(rows), frameon=False)
        figure.suptitle("The same base model, the same stale rollouts, three losses (one seed)")
        figure.savefig(picture, dpi=130)
        plt.close(figure)
