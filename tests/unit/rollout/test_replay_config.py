"""``train.router_replay``: names, what it asks of the engine, and what is refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dppo.errors import ConfigError
from megatron_dppo.mcore.router_replay import check_router_replay_support
from megatron_dppo.rollout.saved import SchedulerState
from tests.unit.configs import config
from tests.unit.streams import unusable


@pytest.mark.parametrize(
    ("given", "name", "asks"),
    [
        ("off", "off", False),
        ("disabled", "off", False),
        ("R3", "rollout", True),
        ("rollout", "rollout", True),
        ("R2", "recorded", False),
        ("compare", "compare", True),
    ],
)
def test_router_replay_accepts_names_of_other_frameworks(given: str, name: str, asks: bool) -> None:
    parsed = config(train={"router_replay": given, "epochs": 2})
    assert parsed.train.router_replay == name and parsed.train.needs_engine_routing == asks


@pytest.mark.parametrize("value", ["R4", True, 3])
def test_another_name_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"train\.router_replay"):
        config(train={"router_replay": value})


def test_recording_for_a_single_update_is_refused() -> None:
    with pytest.raises(ConfigError, match="one update"):
        config(train={"router_replay": "recorded"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_router_fusion", True),
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("moe_router_load_balancing_type", "quantile_balancing"),
        ("moe_router_force_load_balancing", True),
        ("moe_router_force_biased", 0.5),
        ("moe_expert_capacity_factor", 1.25),
        ("overlap_moe_expert_parallel_comm", True),
        ("cuda_graph_impl", "local"),
    ],
)
def test_settings_that_ignore_replay_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"model\.transformer\.{name} = {value!r}"):
        check_router_replay_support({name: value})


def test_settings_that_support_replay_are_accepted() -> None:
    kinds = ["aux_loss", "seq_aux_loss"]
    check_router_replay_support(
        {
            "moe_router_fusion": False,
            "moe_router_load_balancing_type": kinds,
            "moe_expert_capacity_factor": None,
            "cuda_graph_impl": "none",
            "enable_cuda_graph": False,
            "recompute_granularity": "full",
        }
    )


def test_rollouts_sampled_ahead_without_experts_are_sampled_again() -> None:
    stream = SchedulerState(0, 0, {}, [[]], [[]])
    off, replay = config(), config(train={"router_replay": "rollout"})
    was = off.model_dump(mode="json")
    assert "without the experts" in unusable(stream, was, replay)
    assert not unusable(stream, replay.model_dump(mode="json"), replay)
    assert not unusable(stream, replay.model_dump(mode="json"), off)
