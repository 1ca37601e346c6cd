"""Which curves a report has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_CHARTS: Sequence[tuple[str, str, Sequence[tuple[str, str]]]] = (
    ("Reward", "", (("rollout/reward", "training"), ("eval/accuracy", "held-out"))),
    (
        "Outside the trust region",
        "%",
        (
            ("train/mask_fraction", "all"),
            ("train/mask_fraction_positive", "A > 0"),
            ("train/mask_fraction_negative", "A < 0"),
        ),
    ),
    ("Mean |pi - mu|", "", (("train/abs_prob_diff", "all updates"), ("train/abs_prob_diff_first", "before learning"))),
    ("Entropy", "nats", (("train/entropy", "mean"),)),
    ("Response length", "tokens", (("rollout/response_length", "mean"), ("rollout/response_length_max", "longest"))),
    ("Largest ratio pi / mu", "", (("train/ratio_max", "largest"), ("train/ratio", "mean"))),
    ("KL(mu, pi), k3", "nats", (("train/kl_k3", "mean"),)),
    ("Gradient norm", "", (("train/grad_norm", "norm"),)),
    (
        "Shares of the rollouts",
        "%",
        (
            ("rollout/groups_without_signal", "no signal"),
            ("rollout/finish/length", "cut off"),
            ("rollout/reward_failed_fraction", "reward failed"),
        ),
    ),
    ("Age of the rollouts", "steps", (("rollout/policy_age", "mean"), ("rollout/policy_age_max", "oldest"))),
    (
        "Seconds of a step",
        "s",
        (
            ("perf/rollout_seconds", "rollout"),
            ("perf/forward_backward_seconds", "training"),
            ("perf/publish_seconds", "publish"),
            ("perf/waiting_seconds", "waiting"),
        ),
    ),
    ("Tokens a second", "", (("perf/tokens_per_second", "trained"),)),
)
_OTHERS = (("mask_fraction", "What other losses would mask", "%"), ("cosine", "Cosine of their gradient with ours", ""))
_MOST = 1500
"""Points of a curve: more than a screen has."""


def series(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The charts of a run: title, unit and lines, each with its metric, label and ``[step, value]`` points."""
    others = sorted({name.split("/")[2] for record in records for name in record if name.startswith(_COUNTERFACTUAL)})
    charts = [*_CHARTS]
    for part, title, unit in _OTHERS:
        charts.append((title, unit, [(f"{_COUNTERFACTUAL}{other}/{part}", other) for other in others]))
    found = []
    for title, unit, lines in charts:
        scale = 100.0 if unit == "%" else 1.0
        drawn = [
            {"metric": metric, "label": label, "points": _points(records, metric, scale)} for metric, label in lines
        ]
        drawn = [line for line in drawn if line["points"]]
        if drawn:
            found.append({"title": title, "unit": unit, "lines": drawn})
    return found


_COUNTERFACTUAL = "train/counterfactual/"


def others(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every metric that no chart shows, as a chart of its own."""
    shown = {metric for _, _, lines in _CHARTS for metric, _ in lines}
    names = sorted({name for record in records for name in record} - shown - {"step"})
    names = [name for name in names if not name.startswith(_COUNTERFACTUAL)]
    found = [(name, _points(records, name, 1.0)) for name in names]
    return [
        {"title": name, "unit": "", "lines": [{"metric": name, "label": "", "points": points}]}
        for name, points in found
        if points
    ]


def _points(records: Sequence[dict[str, Any]], metric: str, scale: float) -> list[list[float]]:
    points = [
        [record["step"], float(f"{record[metric] * scale:.5g}")] for record in records if record.get(metric) is not None
    ]
    return points[:: -(-len(points) // _MOST) or 1]
