"""What Megatron can be told that would make router replay do nothing, without an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_dppo.errors import ConfigError

_AGAINST_REPLAY = {
    "moe_router_fusion": (True, "the fused kernel chooses the experts by itself"),
    "moe_router_load_balancing_type": (
        {"sinkhorn", "quantile_balancing"},
        "this balancing chooses the experts by itself",
    ),
    "moe_router_force_load_balancing": (True, "it replaces the logits by random ones"),
    "moe_router_force_biased": (None, "it adds a random bias to the logits"),
    "moe_expert_capacity_factor": (None, "it drops tokens from the experts that were replayed"),
    "overlap_moe_expert_parallel_comm": (True, "it runs forward and backward passes of micro-batches interleaved"),
    "enable_cuda_graph": (True, "a captured router never asks for the replayed experts"),
    "external_cuda_graph": (True, "a captured router never asks for the replayed experts"),
    "cuda_graph_impl": ({"local", "transformer_engine"}, "a captured router never asks for the replayed experts"),
}
"""Field of TransformerConfig -> values with which Megatron ignores or undoes replay (None = any value that is set)."""


def refuse_what_ignores_replay(overrides: Mapping[str, Any]) -> None:
    """Stop before a run in which replay would silently do nothing, or not what it says.

    Args:
        overrides: fields of TransformerConfig that the user sets; the defaults of all of these obey replay.

    Raises:
        ConfigError: naming the field.
    """
    for name, (values, reason) in _AGAINST_REPLAY.items():
        value = overrides.get(name)
        if value is None or isinstance(value, list):
            continue
        if values is None or value in (values if isinstance(values, set) else {values}):
            raise ConfigError(
                f"model.transformer.{name} = {value!r} cannot go with train.router_replay: {reason}; remove one of them"
            )
