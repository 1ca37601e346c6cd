"""Whole rows of runs, as a run writes them, with rewards made up."""

from __future__ import annotations

from typing import Any

from megatron_dppo_lab.grid import GridRun
from megatron_dppo_lab.store import Store


def row_of(run: GridRun, store: Store, **values: Any) -> dict[str, Any]:
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
        "base": store.base(run).name,
        "cpu_seconds": 1.5,
        "wall_seconds": 2,
    } | values
