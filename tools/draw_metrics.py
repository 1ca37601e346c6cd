#!/usr/bin/env python
"""Draw a small SVG for each main metric from the three runs of the demo.

python tools/draw_metrics.py runs/demo docs/metrics     # after make demo
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_dppo.report.records import Record, read_metrics
from megatron_dppo_lab.demo import LABELS, Demo
from megatron_dppo_lab.store import Store

METRICS = (
    "rollout/reward",
    "rollout/response_length",
    "rollout/groups_without_signal",
    "rollout/policy_age",
    "train/mask_fraction",
    "train/mask_fraction_positive",
    "train/mask_fraction_negative",
    "train/abs_prob_diff",
    "train/abs_prob_diff_first",
    "train/divergence",
    "train/ratio",
    "train/ratio_max",
    "train/kl_k3",
    "train/entropy",
    "train/grad_norm",
    "train/counterfactual/grpo/mask_fraction",
    "train/counterfactual/grpo/cosine",
)
COLORS = ("#3d85c6", "#e08a00", "#888888")
"""Colors of DPPO, GRPO and PG-IS, readable on a white and on a dark ground."""
WIDTH = 260
HEIGHT = 96
LEFT = 48
"""Width of the numbers at the axis."""
MARGIN = 8


def picture(runs: Sequence[Sequence[Record]], metric: str) -> str:
    """Return the SVG of a metric.

    Args:
        runs: Records of each run.
        metric: Name of the metric.

    Raises:
        ValueError: No run has the metric.
    """
    lines = [[(record["step"], record[metric]) for record in run if record.get(metric) is not None] for run in runs]
    points = [point for line in lines for point in line]
    if not points:
        raise ValueError(f"Expected a metric of the runs, got {metric!r}")
    last_step = max(step for step, _ in points)
    low = min(0.0, *(value for _, value in points))
    high = max(value for _, value in points)
    high = high if high > low else low + 1.0

    def place_x(step: float) -> float:
        return LEFT + step / last_step * (WIDTH - LEFT - MARGIN)

    def place_y(value: float) -> float:
        return HEIGHT - MARGIN - (value - low) / (high - low) * (HEIGHT - 2 * MARGIN)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="10"><title>{metric} over {last_step} steps</title>'
    ]
    for value in (low, high):
        y = place_y(value)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - MARGIN}" stroke="#999" stroke-opacity=".5"/>')
        parts.append(f'<text x="{LEFT - 4}" y="{y + 3:.1f}" text-anchor="end" fill="#888">{value:.3g}</text>')
    for line, color in zip(lines, COLORS, strict=True):
        path = "L".join(f"{place_x(step):.1f} {place_y(value):.1f}" for step, value in line)
        if path:
            parts.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
    return "".join([*parts, "</svg>\n"])


def file_name(metric: str) -> str:
    """Return the name of the metric's picture, such as ``train_entropy.svg``."""
    return metric.replace("/", "_") + ".svg"


def main() -> None:
    """Draw all metrics of a demo's folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", type=Path, help="folder of a finished make demo")
    parser.add_argument("target", type=Path, help="folder of the pictures")
    args = parser.parse_args()
    demo_folder, target = args.demo, args.target
    store = Store(demo_folder)
    runs = [read_metrics(store.records(run) / "metrics.jsonl") for run in Demo().runs]
    if not all(runs):
        raise SystemExit(f"{demo_folder} has no records of {', '.join(LABELS.values())}. Fix: run make demo")
    target.mkdir(exist_ok=True)
    for metric in METRICS:
        (target / file_name(metric)).write_text(picture(runs, metric), encoding="utf-8")
    print(f"{len(METRICS)} pictures in {target}")


if __name__ == "__main__":
    main()
