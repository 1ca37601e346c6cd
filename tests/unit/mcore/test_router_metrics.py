"""Metrics of single layers become the worst one."""

from __future__ import annotations

from megatron_dppo.mcore.router_replay import BY_LAYER, with_worst_layer


def test_the_worst_layer_stands_for_all() -> None:
    metrics = {"router_missing": 0.0, f"{BY_LAYER}0": 0.01, f"{BY_LAYER}5": 0.9, f"{BY_LAYER}7": 0.02}
    assert with_worst_layer(metrics) == {"router_missing": 0.0, "router_live_disagreement_max": 0.9}
    assert with_worst_layer({"router_missing": 0.0}) == {"router_missing": 0.0}
