"""Checks of a run before another one is compared with it: two runs that nothing moves are always equal."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor


def assert_trains(run: Path, *, evaluation_may_stay: bool = False) -> None:
    """Check that a run had a gradient, rewards that differ within a group, and evaluations that differ.

    Args:
        run: Folder of the run.
        evaluation_may_stay: The evaluations may all be the same, because of what the test trains. A run with fewer
            than two evaluations has nothing to compare.
    """
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "train/grad_norm" in record]
    norms = [step["train/grad_norm"] for step in steps]
    assert any(norm > 0 for norm in norms), f"no step of {run} has a gradient: {norms}"
    shares = [step["rollout/groups_without_signal"] for step in steps]
    assert any(share < 1 for share in shares), f"in no group of {run} do rewards differ: {shares}"
    evaluations = [values for record in records if (values := _evaluation(record))]
    if len(evaluations) > 1 and not evaluation_may_stay:
        assert any(values != evaluations[0] for values in evaluations), f"no evaluation of {run} changes: {evaluations}"


def assert_different_folders(actual: Path, expected: Path) -> None:
    """Check that a run is not compared with itself."""
    assert actual.resolve() != expected.resolve(), f"{actual} is compared with itself"


def assert_gradient(gradients: Iterable[Tensor | None]) -> None:
    """Check that a reference has a gradient at all: without one every layout has the same weights."""
    assert any(gradient is not None and bool(gradient.any()) for gradient in gradients), "the reference has no gradient"


def _evaluation(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name.startswith("eval/")}
