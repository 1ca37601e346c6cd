"""Whole rows of runs, as a run writes them, with rewards made up."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from megatron_dppo.commands.experiments.grid import Run
from megatron_dppo.commands.experiments.store import Store
from megatron_dppo.commands.experiments.tokens import EDGES, RULES


def row_of(run: Run, store: Store, **values: Any) -> dict[str, Any]:
    steps = run.settings["run"]["num_steps"]
    return {
        "key": run.key,
        "task": run.task,
        "loss": run.loss,
        "mismatch": run.mismatch,
        "seed": run.seed,
        "phase": run.phase,
        "candidate": run.candidate,
        "settings": run.settings,
        "error": "",
        "curves": {"rollout/reward": [0.5] * steps, "train/mask_fraction": [0.25, 1]},
        "tokens": tokens_of(run.tokens),
        "base": store.base(run).name,
        "cpu_seconds": 1.5,
        "wall_seconds": 2,
    } | values


def tokens_of(measurement: str) -> dict[str, Any]:
    edges = list(pairwise(EDGES))
    empty = {"tokens": 0, "tv": None, "ratio": None}
    bins = [{"low": low, "high": high, "tokens": 3, "tv": 1e-3, "ratio": [0.9, 1.0, 1.1]} for low, high in edges[1:]]
    bins.insert(0, {"low": edges[0][0], "high": edges[0][1], **empty})
    words = [{"word": "w0001", "masked": 2, "mean_mu": 0.1}]
    rule = {"share": 0.5, "bins": [None, *[0.5] * (len(edges) - 1)], "words": words}
    parts: dict[str, dict[str, Any]] = {
        "": {},
        "ratio_tv": {"bins": bins, "tokens": 27},
        "most_clipped": {"bins": bins, **dict.fromkeys(RULES, rule)},
    }
    return parts[measurement]
