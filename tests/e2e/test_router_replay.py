"""Router replay in whole runs: the local engine samples in bf16, training computes in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import flags, records, train

pytestmark = pytest.mark.e2e


def steps(short_run: list[str], tmp_path: Path, processes: int = 2, **more: Any) -> list[dict[str, Any]]:
    """The records of the training steps of a run."""
    size = flags(rollout__prompts_per_step=8, rollout__samples_per_prompt=8)
    arguments = size + flags(rollout__dtype="bf16", model__dtype="fp32", train__mini_batches=1, train__epochs=1, **more)
    result = train([*short_run, *arguments], processes=processes)
    assert result.returncode == 0, result.stdout + result.stderr
    return records(tmp_path / "run")[1:]


@pytest.mark.long
def test_without_replay_engine_and_trainer_choose_other_experts(short_run: list[str], tmp_path: Path) -> None:
    actual = steps(short_run, tmp_path, train__router_replay="compare")
    for step in actual:
        assert step["train/router_disagreement"] == step["train/router_live_disagreement"] < 0.2
        assert step["train/router_missing"] == 0
    assert sum(step["train/router_disagreement"] for step in actual) > 0


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"tensor_model_parallel_size": 2}, marks=pytest.mark.long),
        pytest.param({"context_parallel_size": 2}, marks=pytest.mark.long),
        pytest.param({"expert_model_parallel_size": 2}, marks=pytest.mark.long),
        {"pipeline_model_parallel_size": 2},
    ],
)
def test_after_replay_they_choose_the_same(short_run: list[str], tmp_path: Path, layout: dict[str, int]) -> None:
    parallel = {f"parallel__{key}": value for key, value in layout.items()}
    replay = {"train__router_replay": "R3", "train__router_replay_weights": "true", "train__max_staleness": 1}
    actual = steps(short_run, tmp_path, **replay, **parallel)
    for step in actual:
        assert step["train/router_disagreement"] == 0 == step["train/router_missing"]
        assert step["train/router_live_disagreement"] < 0.2
        assert 0 < step["train/router_weight_diff"] < 0.05
    assert sum(step["train/router_live_disagreement"] for step in actual) > 0


def test_recorded_routing_is_replayed_in_the_later_updates_of_a_step(short_run: list[str], tmp_path: Path) -> None:
    more = flags(train__router_replay="recorded", train__mini_batches=2, train__epochs=2, optimizer__lr=1e-2)
    result = train([*short_run, *more, *flags(parallel__pipeline_model_parallel_size=2)], processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    for step in records(tmp_path / "run")[1:]:
        assert step["train/router_disagreement"] == 0 == step["train/router_missing"]
        assert step["train/router_live_disagreement"] > 0, "the updates move the router away from what was recorded"


@pytest.mark.long
def test_what_cannot_be_replayed_is_refused_with_the_reason(short_run: list[str]) -> None:
    for more, reason in (
        (flags(train__router_replay="recorded", train__mini_batches=1, train__epochs=1), "has no effect with one"),
        (flags(train__router_replay="R3", model__transformer__moe_expert_capacity_factor=1.0), "drops tokens"),
        (flags(train__router_replay_weights="true"), "has no effect with train.router_replay = 'off'"),
        (flags(train__router_replay="R3", model__transformer__moe_router_load_balancing_type="sinkhorn"), "by itself"),
    ):
        result = train([*short_run, *more])
        assert result.returncode == 2 and reason in result.stdout + result.stderr, result.stdout + result.stderr
