"""The training curves as one PNG file."""

from collections.abc import Sequence
from pathlib import Path

from megatron_dppo.report.records import Record, read_metrics

_PANELS = {
    "reward": ("Reward", (("rollout/reward", "training reward", 1.0), ("eval/accuracy", "held-out accuracy", 1.0))),
    "distance": ("Distance to the rollout policy", (("train/abs_prob_diff", "mean |π − μ|", 1.0),)),
    "masked": ("Outside the trust region (%)", (("train/mask_fraction", "masked tokens", 100.0),)),
    "entropy": ("Entropy (nats)", (("train/entropy", "mean per token", 1.0),)),
    "length": ("Response length (tokens)", (("rollout/response_length", "mean", 1.0),)),
}
"""Title and lines of each panel, by its key in the mosaic. A line is ``(metric, label, factor)``."""

_COUNTERFACTUAL_PANELS = {
    "others": ("What other losses would mask (%)", "mask_fraction", 100.0),
    "cosine": ("Cosine of their gradient with this loss's", "cosine", 1.0),
}
"""Title, last part of the metric's name, and factor of each panel that compares losses."""
_MOSAIC = [["reward", "distance", "masked"], ["reward", "entropy", "length"]]


def write_curves(metrics: Path, picture: Path, title: str) -> None:
    """Draw the records of ``metrics.jsonl`` into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = read_metrics(metrics, skip_damaged=True)
    style = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}
    with plt.rc_context({**style, "font.size": 10}):
        other_losses = sorted({k.split("/")[2] for r in records for k in r if k.startswith("train/counterfactual/")})
        mosaic = [*_MOSAIC, ["others", "cosine", "cosine"]] if other_losses else _MOSAIC
        size = (13, 2.6 * len(mosaic))
        figure, axes = plt.subplot_mosaic(mosaic, figsize=size, width_ratios=[1.5, 1, 1], layout="constrained")
        for panel, (panel_title, part, scale) in _COUNTERFACTUAL_PANELS.items() if other_losses else ():
            for name in other_losses:
                steps, values = _series(records, f"train/counterfactual/{name}/{part}")
                axes[panel].plot(steps, [v * scale for v in values], label=name, linewidth=1.2)
            axes[panel].set_title(panel_title, loc="left", fontsize=11)
            axes[panel].set_xlabel("rollout step")
            axes[panel].legend(frameon=False, fontsize=8, ncols=2)
        for panel, (name, lines) in _PANELS.items():
            axis = axes[panel]
            for color, (key, label, scale) in zip(("#2a6fbb", "#d1495b"), lines, strict=False):
                steps, values = _series(records, key)
                marker = "o" if key.startswith("eval/") else None
                axis.plot(steps, [v * scale for v in values], label=label, color=color, marker=marker, markersize=4)
            axis.set_title(name, loc="left", fontsize=11)
            axis.set_xlabel("rollout step")
            if not axis.dataLim.y0 < 0:  # Rewards of a user's function can be negative.
                axis.set_ylim(bottom=0)
            axis.legend(frameon=False, fontsize=9)
        figure.suptitle(title, fontsize=12, fontweight="bold")
        figure.savefig(picture, dpi=110)
        plt.close(figure)


def _series(records: Sequence[Record], key: str) -> tuple[list[int], list[float]]:
    points = [(r["step"], r[key]) for r in records if r.get(key) is not None]
    return [p[0] for p in points], [p[1] for p in points]
