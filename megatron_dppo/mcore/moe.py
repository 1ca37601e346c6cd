"""Megatron's load-balancing losses: their scale, and their values for the metrics."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils

from megatron_dppo.config.layout import Layout


def balance_coefficients(overrides: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """``moe_aux_loss_coeff`` such that its gradient is the same for every layout.

    With ``calculate_per_token_loss`` Megatron scales a rank's part of the load-balancing loss by the tokens of that
    rank, and sums the parts. Where sequence or context parallelism splits a row over n ranks, that is 1/n of what one
    rank gives (0.16.1 and 0.19.2, ``TopKRouter.attach_and_log_load_balancing_loss``). To be removed when upstream
    scales by the tokens of the row.
    """
    coefficient = overrides.get("moe_aux_loss_coeff")
    if not coefficient:
        return {}
    parts = layout.cp * (layout.tp if layout.sequence_parallel else 1)
    if isinstance(coefficient, list):
        return {"moe_aux_loss_coeff": [value * parts for value in coefficient]}
    return {"moe_aux_loss_coeff": coefficient * parts}


class BalanceLosses:
    """Reads and clears what Megatron's routers recorded since the last call.

    Args:
        config: the model's; without a load-balancing loss there is nothing to read.
    """

    def __init__(self, config: TransformerConfig) -> None:
        kinds = config.moe_router_load_balancing_type
        used = config.num_moe_experts is not None and bool(config.moe_aux_loss_coeff)
        self._names = _tracked(kinds) if used else []
        self._num_layers = config.num_layers
        frequency = config.moe_layer_freq
        self._num_routers = sum(frequency) if isinstance(frequency, list) else config.num_layers

    def __call__(self, num_micro_batches: int) -> dict[str, float]:
        """Each loss by name, without its coefficient, as the mean over layers, micro-batches and ranks; a collective.

        1 is perfect balance.
        """
        if not self._names:
            return {}
        tracker = moe_utils.get_moe_layer_wise_logging_tracker()
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        for name in self._names:
            tracker.setdefault(name, {"values": torch.zeros(self._num_layers, device=device)})
        moe_utils.reduce_aux_losses_tracker_across_ranks(self._names)
        count = self._num_routers * num_micro_batches
        values = {name: float(tracker[name]["values"].sum()) / count for name in self._names}
        moe_utils.clear_aux_losses_tracker()
        return values


def _tracked(kinds: str | list[str]) -> list[str]:
    names = {
        "aux_loss": "load_balancing_loss",
        "seq_aux_loss": "seq_load_balancing_loss",
        "global_aux_loss": "global_load_balancing_loss",
    }
    return [names[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind in names]
