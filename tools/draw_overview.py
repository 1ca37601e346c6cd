#!/usr/bin/env python
"""Draw the first picture of the README: three losses on a real language model with stale rollouts.

python tools/draw_overview.py [docs/results/real_model/rows.jsonl.xz] [docs/overview.png]
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt

from draw_real_model import EVAL_EVERY  # selects the backend without a screen, too
from megatron_dppo_lab.row import read_external_rows

CONDITION = "staleness 4"


class Curve(NamedTuple):
    """One loss of the picture."""

    loss: str
    """Name of the loss in the rows."""
    label: str
    color: str
    label_height: float
    """Height of the label beside the end of the curve, in units of accuracy."""


CURVES = (
    Curve("grpo", "GRPO clip-higher", "#c77700", 1.03),
    Curve("dppo_binary_tv cap 5", "DPPO", "#0072b2", 0.865),
    Curve("pg_is", "PG-IS, no trust region", "#6e6e6e", 0.70),
)


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="?", default=Path("docs/results/real_model/rows.jsonl.xz"))
    parser.add_argument("picture", type=Path, nargs="?", default=Path("docs/overview.png"))
    args = parser.parse_args()
    rows = [each.row for each in read_external_rows(args.rows) if each.row["mismatch"] == CONDITION]
    with plt.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 12}):
        figure, axis = plt.subplots(figsize=(9, 4.4), layout="constrained")
        for curve in CURVES:
            draw(axis, curve, [row["curves"] for row in rows if row["loss"] == curve.loss])
        axis.set_xlim(0, 20)
        axis.set_ylim(0.3, 1.03)
        axis.set_xticks(range(0, 21, EVAL_EVERY))
        axis.set_xlabel("rollout step; SmolLM2-135M-Instruct learns sums, three seeds (thin) and their mean")
        axis.set_ylabel("held-out accuracy")
        axis.grid(alpha=0.2)
        axis.set_title(
            "Rollouts of 4 steps ago: without a trust region one of three seeds falls;\n"
            "DPPO masks less than half as many tokens as GRPO",
            loc="left",
            fontsize=14,
            fontweight="bold",
        )
        figure.savefig(args.picture, dpi=130, bbox_inches="tight")
        plt.close(figure)


def draw(axis: Any, curve: Curve, seeds: list[dict[str, list[float]]]) -> None:
    """Draw the accuracy of each seed, their mean, and the share of masked tokens as the label."""
    accuracies = [seed["eval/accuracy"] for seed in seeds]
    steps = [EVAL_EVERY * index for index in range(len(accuracies[0]))]
    for accuracy in accuracies:
        axis.plot(steps, accuracy, color=curve.color, alpha=0.35, linewidth=1.2)
    mean = [statistics.fmean(values) for values in zip(*accuracies, strict=True)]
    axis.plot(steps, mean, color=curve.color, linewidth=3)

    masked = [statistics.fmean(seed["train/mask_fraction"]) for seed in seeds]
    share = statistics.fmean(masked)
    masks = f"masks {100 * share:.0f} % of the tokens" if share else "masks nothing"
    ends = ", ".join(f"{accuracy:.2f}" for accuracy in sorted(values[-1] for values in accuracies))
    axis.text(
        1.02,
        curve.label_height,
        f"{curve.label}\nends at {ends}\n{masks}",
        color=curve.color,
        transform=axis.get_yaxis_transform(),
        verticalalignment="top",
        linespacing=1.25,
    )


if __name__ == "__main__":
    main()
