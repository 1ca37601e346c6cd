"""Routers that padding would change are refused where rows have padding, and only there."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dppo.errors import ConfigError
from megatron_dppo.mcore.row_padding import check_padding_support


@pytest.mark.parametrize(
    "fields",
    [
        {"moe_router_load_balancing_type": "sinkhorn"},
        {"moe_router_load_balancing_type": "quantile_balancing"},
        {"moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]},
        {"moe_expert_capacity_factor": 1.0},
    ],
)
def test_routers_that_choose_by_all_tokens_need_rows_without_padding(fields: dict[str, Any]) -> None:
    check_padding_support(fields, 1)
    for multiple in (2, 4, 16):
        with pytest.raises(ConfigError, match=f"multiples of {multiple} tokens"):
            check_padding_support(fields, multiple)


def test_other_routers_are_allowed_with_padding() -> None:
    for value in ("aux_loss", "seq_aux_loss", ["aux_loss", "global_aux_loss"], "none"):
        check_padding_support({"moe_router_load_balancing_type": value, "moe_z_loss_coeff": 1e-3}, 4)
