"""The charts of a report."""

from collections.abc import Sequence
from typing import TypedDict

from megatron_dppo.report.records import Record


class Line(TypedDict):
    """One line of a chart."""

    metric: str
    label: str
    points: list[list[float]]
    """Pairs ``[step, value]``."""


class Chart(TypedDict):
    """A chart of the page."""

    title: str
    unit: str
    lines: list[Line]


_CHARTS: Sequence[tuple[str, str, Sequence[tuple[str, str]]]] = (
    (
        "Reward",
        "",
        (("rollout/reward", "training"), ("rollout/greedy_reward", "greedy"), ("eval/accuracy", "held-out")),
    ),
    (
        "Masked tokens",
        "%",
        (
            ("train/mask_fraction", "all"),
            ("train/mask_fraction_positive", "A > 0"),
            ("train/mask_fraction_negative", "A < 0"),
        ),
    ),
    ("Mean |pi - mu|", "", (("train/abs_prob_diff", "all updates"), ("train/abs_prob_diff_first", "before updates"))),
    ("Entropy", "nats", (("train/entropy", "mean"),)),
    ("Response length", "tokens", (("rollout/response_length", "mean"), ("rollout/response_length_max", "maximum"))),
    ("Ratio pi / mu", "", (("train/ratio_max", "maximum"), ("train/ratio", "mean"))),
    ("KL(mu, pi), k3", "nats", (("train/kl_k3", "mean"),)),
    ("Gradient norm", "", (("train/grad_norm", "norm"),)),
    (
        "Fractions of the rollouts",
        "%",
        (
            ("rollout/groups_without_signal", "no signal"),
            ("rollout/finish/length", "truncated"),
            ("rollout/reward_failed_fraction", "reward failed"),
        ),
    ),
    ("Age of the rollouts", "steps", (("rollout/policy_age", "mean"), ("rollout/policy_age_max", "maximum"))),
    (
        "Time per step",
        "s",
        (
            ("perf/rollout_seconds", "rollout"),
            ("perf/forward_backward_seconds", "training"),
            ("perf/publish_seconds", "weight sync"),
            ("perf/waiting_seconds", "waiting"),
        ),
    ),
    ("Tokens per second", "", (("perf/tokens_per_second", "trained"),)),
)
_COUNTERFACTUAL_CHARTS = (
    ("mask_fraction", "Masked by other losses", "%"),
    ("cosine", "Cosine of their gradients with this loss", ""),
)
_MAX_POINTS = 1500
"""Points of a curve, more than a screen has pixels."""


def build_charts(records: Sequence[Record]) -> list[Chart]:
    """Return the charts of a run: title, unit and lines, each with metric, label and ``[step, value]`` points."""
    other_losses = sorted(
        {name.split("/")[2] for record in records for name in record if name.startswith(_COUNTERFACTUAL)}
    )
    charts = [*_CHARTS]
    for part, title, unit in _COUNTERFACTUAL_CHARTS:
        charts.append((title, unit, [(f"{_COUNTERFACTUAL}{other}/{part}", other) for other in other_losses]))
    result: list[Chart] = []
    for title, unit, lines in charts:
        scale = 100.0 if unit == "%" else 1.0
        drawn: list[Line] = [
            {"metric": metric, "label": label, "points": points}
            for metric, label in lines
            if (points := _points(records, metric, scale))
        ]
        if drawn:
            result.append({"title": title, "unit": unit, "lines": drawn})
    return result


_COUNTERFACTUAL = "train/counterfactual/"


def remaining_charts(records: Sequence[Record]) -> list[Chart]:
    """Return a chart for every metric that no other chart shows."""
    shown = {metric for _, _, lines in _CHARTS for metric, _ in lines}
    names = sorted({name for record in records for name in record} - shown - {"step"})
    names = [name for name in names if not name.startswith(_COUNTERFACTUAL)]
    return [
        {"title": name, "unit": "", "lines": [{"metric": name, "label": "", "points": points}]}
        for name in names
        if (points := _points(records, name, 1.0))
    ]


def _points(records: Sequence[Record], metric: str, scale: float) -> list[list[float]]:
    points = [
        # Five digits are more than a screen shows, and keep the page small.
        [record["step"], float(f"{record[metric] * scale:.5g}")]
        for record in records
        if record.get(metric) is not None
    ]
    # Keep every n-th point, with n rounded up.
    return points[:: -(-len(points) // _MAX_POINTS) or 1]
