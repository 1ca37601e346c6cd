"""The verdict of launch/smoke.sh: each fault of a run fails the part that it belongs to, and no other."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import ROOT

spec = importlib.util.spec_from_file_location("judge_smoke", ROOT / "launch/judge_smoke.py")
assert spec is not None and spec.loader is not None
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

STEP = {
    "rollout/reward": 0.1,
    "train/router_missing": 0.0,
    "train/router_disagreement": 0.0,
    "train/abs_prob_diff_first": 1e-6,
    "train/grad_norm": 0.2,
}


def write_run(folder: Path, *, changed: dict[str, Any], steps: int = 4, resumed: Any = 2, export: bool = True) -> None:
    lines = [{"step": 0, "eval/accuracy": 0.0}, *({"step": i + 1} | STEP for i in range(steps))]
    lines[1] |= changed
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    starts = [{"resumed_step": None}, {"resumed_step": resumed}]
    (folder / "starts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in starts))
    (folder / "hf").mkdir()
    if export:
        (folder / "hf/model.safetensors").touch()


@pytest.mark.parametrize(
    ("fault", "part"),
    [
        ({}, None),
        ({"steps": 3}, "steps"),
        ({"resumed": None}, "save at SIGTERM and resume"),
        ({"export": False}, "exported model"),
        ({"changed": {"train/router_missing": 0.01}}, "router replay: train/router_missing"),
        ({"changed": {"train/router_disagreement": 0.3}}, "router replay: train/router_disagreement"),
        ({"changed": {"train/abs_prob_diff_first": float("nan")}}, "log-probabilities of both programs"),
        ({"changed": {"train/grad_norm": float("inf")}}, "gradients"),
    ],
)
def test_each_fault_fails_its_part_alone(fault: dict[str, Any], part: str | None, tmp_path: Path) -> None:
    write_run(tmp_path, **({"changed": {}} | fault))
    failed = [name for name, is_good, _ in module.judge(tmp_path, 0, 0) if not is_good]
    assert failed == ([] if part is None else [part])


def test_exit_codes_and_an_empty_folder_fail(tmp_path: Path) -> None:
    results = {name: is_good for name, is_good, _ in module.judge(tmp_path, 2, 0)}
    assert not results.pop("train, sync and proof of weights") and results.pop("resume, sync and proof of weights")
    assert not any(results.values())
