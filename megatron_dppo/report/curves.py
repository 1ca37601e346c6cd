"""The training curves as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_dppo.report.records import read_metrics

_PANELS = {
    "reward": ("Reward", (("rollout/reward", "training reward", 1.0), ("eval/accuracy", "held-out accuracy", 1.0))),
    "distance": ("Distance to the rollout policy", (("train/abs_prob_diff", "mean |π − μ|", 1.0),)),
    "masked": ("Outside the trust region (%)", (("train/mask_fraction", "masked tokens", 100.0),)),
    "entropy": ("Entropy (nats)", (("train/entropy", "mean per token", 1.0),)),
    "length": ("Response length (tokens)", (("rollout/response_length", "mean", 1.0),)),
}
"""Place in the picture -> title and lines: (metric, label, factor)."""

_OTHERS = {
    "others": ("What other losses would mask (%)", "mask_fraction", 100.0),
    "cosine": ("Cosine of their gradient with this loss's", "cosine", 1.0),
}
"""Place -> title, part of the metric's name behind that of the loss, factor."""
_MOSAIC = [["reward", "distance", "masked"], ["reward", "entropy", "length"]]


def write_curves(metrics: Path, picture: Path, title: str) -> None:
    """Draw the records of ``metrics.jsonl`` to a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = read_metrics(metrics)
    style = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}
    with plt.rc_context({**style, "font.size": 10}):
        others = sorted({k.split("/")[2] for r in records for k in r if k.startswith("train/counterfactual/")})
        mosaic = [*_MOSAIC, ["others", "cosine", "cosine"]] if others else _MOSAIC
        size = (13, 2.6 * len(mosaic))
        figure, axes = plt.subplot_mosaic(mosaic, figsize=size, width_ratios=[1.5, 1, 1], layout="constrained")
        for place, (title_of, part, scale) in _OTHERS.items() if others else ():
            for name in others:
                steps, values = _series(records, f"train/counterfactual/{name}/{part}")
                axes[place].plot(steps, [v * scale for v in values], label=name, linewidth=1.2)
            axes[place].set_title(title_of, loc="left", fontsize=11)
            axes[place].set_xlabel("rollout step")
            axes[place].legend(frameon=False, fontsize=8, ncols=2)
        for place, (name, lines) in _PANELS.items():
            axis = axes[place]
            for color, (key, label, scale) in zip(("#2a6fbb", "#d1495b"), lines, strict=False):
                steps, values = _series(records, key)
                marker = "o" if key.startswith("eval/") else None
                axis.plot(steps, [v * scale for v in values], label=label, color=color, marker=marker, markersize=4)
            axis.set_title(name, loc="left", fontsize=11)
            axis.set_xlabel("rollout step")
            if not axis.dataLim.y0 < 0:  # rewards of a user's function may be negative
                axis.set_ylim(bottom=0)
            axis.legend(frameon=False, fontsize=9)
        figure.suptitle(title, fontsize=12, fontweight="bold")
        figure.savefig(picture, dpi=110)
        plt.close(figure)


def _series(records: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    points = [(r["step"], r[key]) for r in records if r.get(key) is not None]
    return [p[0] for p in points], [p[1] for p in points]
