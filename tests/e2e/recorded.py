"""A step's file must agree with the metrics that the losses themselves reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tests.e2e.runs import step_records


def rows_of(folder: Path, step: int) -> Any:
    """The samples of a step, as a user reads them."""
    return pd.read_parquet(folder / f"rollouts/step_{step:06d}.parquet")


def from_file(rows: Any) -> dict[str, float]:
    """The means of the step's updates, by their definition in docs/loss.md."""
    differences, dropped = [], []
    for _, part in rows.groupby("update"):
        mask, keep, pi, mu, advantage = (
            np.concatenate(part[name].tolist())
            for name in ("loss_mask", "keep", "logprobs", "rollout_logprobs", "advantages")
        )
        acts = mask & (advantage != 0)
        differences.append(np.abs(np.exp(pi[mask].astype(float)) - np.exp(mu[mask].astype(float))).mean())
        if acts.any():  # else the metric has no value
            dropped.append((acts & ~keep).sum() / acts.sum())
    masked = {"train/mask_fraction": float(np.mean(dropped))} if dropped else {}
    return masked | {
        "rollout/reward": rows.reward.mean(),
        "rollout/response_length": rows.response_ids.map(len).mean(),
        "train/abs_prob_diff": float(np.mean(differences)),
    }


def check_agreement(folder: Path, samples: int) -> None:
    """Every step of the run was written once, and says what its record in ``metrics.jsonl`` says."""
    records = step_records(folder)
    files = sorted((folder / "rollouts").iterdir())
    assert [file.name for file in files] == [f"step_{record['step']:06d}.parquet" for record in records]
    version = 0
    for record in records:
        if not record["train/skipped_updates"]:
            assert (rows_of(folder, record["step"]).eval("trained_policy_version - update") == version).all()
        version = record["train/policy_version"]
        rows = rows_of(folder, record["step"])
        assert len(rows) == samples and rows["sample"].tolist() == list(range(samples))
        assert set(rows.step) == {record["step"]}
        for name, value in from_file(rows).items():
            assert name in record and np.isclose(value, record[name], rtol=2e-4, atol=1e-7), (
                name,
                value,
                record.get(name),
            )
        for row in rows.itertuples():
            lengths = {len(getattr(row, name)) for name in ("response_ids", "loss_mask", "keep", "logprobs")}
            assert len(lengths) == 1
            assert (np.isfinite(row.logprobs) == row.loss_mask).all()
