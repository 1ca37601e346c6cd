#!/usr/bin/env python
"""Draw the losses side by side on the real language model: reward, held-out accuracy and masked tokens.

python tools/draw_real_model.py [docs/results/real_model/rows.jsonl.xz] [docs/results/real_model/losses.png]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from megatron_dppo_lab.row import read_external_rows
from megatron_dppo_lab.statistics import band, cells, series

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LOSSES = {
    "dppo_binary_tv cap 5": ("DPPO-Binary-TV", "#0072b2"),
    "grpo": ("GRPO clip-higher", "#e69f00"),
    "pg_is": ("PG-IS, no trust region", "#6e6e6e"),
}
CONDITIONS = {
    "none": "on-policy",
    "staleness 4": "4 steps old",
    "staleness 16": "16 steps old",
    "weights int8": "INT8 rollouts",
    "weights int4": "INT4 rollouts",
}
METRICS = {
    "rollout/reward": "training reward",
    "eval/accuracy": "held-out accuracy, greedy",
    "train/mask_fraction": "masked tokens",
}
EVAL_EVERY = 5


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="?", default=Path("docs/results/real_model/rows.jsonl.xz"))
    parser.add_argument("picture", type=Path, nargs="?", default=Path("docs/results/real_model/losses.png"))
    args = parser.parse_args()
    rows_of_cell = cells(each.row for each in read_external_rows(args.rows))
    style = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}
    with plt.rc_context({**style, "font.size": 9}):
        figure, axes = plt.subplots(
            len(CONDITIONS), len(METRICS), figsize=(11, 2.7 * len(CONDITIONS)), layout="constrained", sharex=True
        )
        for line, (condition, name) in zip(axes, CONDITIONS.items(), strict=True):
            for axis, (metric, title) in zip(line, METRICS.items(), strict=True):
                for loss, (label, color) in LOSSES.items():
                    draw(axis, rows_of_cell.get(("smollm2", condition, loss), ()), metric, label, color)
                axis.set_title(f"{title}, {name}", loc="left")
                axis.set_ylim(0, None if metric == "train/mask_fraction" else 1)
        for axis in axes[-1]:
            axis.set_xlabel("rollout step")
        handles, names = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=len(LOSSES), frameon=False)
        figure.suptitle("SmolLM2-135M-Instruct learns sums on two CPU cores (mean and range over three seeds)")
        figure.savefig(args.picture, dpi=110)
        plt.close(figure)


def draw(axis: Any, rows: Sequence[Mapping[str, Any]], metric: str, label: str, color: str) -> None:
    """Draw the mean and the range over seeds of one loss."""
    curves = [series(row, metric) for row in rows]
    count = min(map(len, curves), default=0)
    bands = [over for i in range(count) if (over := band(curve[i] for curve in curves)) is not None]
    is_evaluation = metric == "eval/accuracy"
    steps = [i * EVAL_EVERY for i in range(count)] if is_evaluation else range(1, count + 1)
    axis.plot(steps, [b.mean for b in bands], color=color, label=label, linewidth=1.6)
    axis.fill_between(steps, [b.low for b in bands], [b.high for b in bands], color=color, alpha=0.15, linewidth=0)


if __name__ == "__main__":
    main()
