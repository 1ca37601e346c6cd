"""FP8 by Megatron's switches: where it can be, and what is said elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_dppo.errors import ConfigError
from megatron_dppo.mcore.shims import apply_shims
from megatron_dppo.parallel.platform import Platform

CPU, GPU = Platform(torch.device("cpu"), "gloo"), Platform(torch.device("cuda", 0), "nccl")
HYBRID = {"fp8": "hybrid"}


@pytest.mark.parametrize(
    ("fields", "dtype", "platform", "engine", "capability", "message"),
    [
        (HYBRID, "bf16", CPU, False, (9, 0), "there is no GPU"),
        (HYBRID, "bf16", GPU, False, (9, 0), "here Transformer Engine"),
        (HYBRID, "bf16", GPU, True, (8, 0), r"capability 8\.9 or above"),
        (
            HYBRID | {"fp8_recipe": "mxfp8"},
            "bf16",
            GPU,
            True,
            (9, 0),
            r"'mxfp8' needs .* 10\.0 or above, .* 9\.0",
        ),
        (HYBRID, "fp16", GPU, True, (9, 0), "with model.dtype = 'fp16'"),
        ({"fp8_margin": 1}, "bf16", GPU, True, (9, 0), "fp8_margin = 1 has no effect"),
        (HYBRID, "bf16", GPU, True, (9, 0), None),
        (HYBRID | {"fp8_recipe": "mxfp8"}, "bf16", GPU, True, (10, 0), None),
        ({}, "fp32", CPU, False, (0, 0), None),
    ],
)
def test_fp8_is_refused_where_it_is_not_supported(
    fields: dict[str, Any],
    dtype: str,
    platform: Platform,
    engine: bool,
    capability: tuple[int, int],
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apply_shims(CPU)
    from megatron_dppo.mcore.fusions import check_fp8

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if message is None:
        check_fp8(fields, dtype, platform, transformer_engine=engine)
        return
    with pytest.raises(ConfigError, match=message):
        check_fp8(fields, dtype, platform, transformer_engine=engine)


def test_rows_are_multiples_of_a_tile() -> None:
    apply_shims(CPU)
    from megatron_dppo.mcore.fusions import row_multiple

    assert row_multiple({}) == row_multiple({"moe_z_loss_coeff": 0.1}) == 1
    assert row_multiple(HYBRID) == row_multiple(HYBRID | {"fp8_recipe": "tensorwise"}) == 16
    assert row_multiple(HYBRID | {"fp8_recipe": "mxfp8"}) == 32
