"""The head's gradient on the CPU: rows of several rooms with a remainder, every dtype, with and without rounding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron_dppo.head import gradient as gradient_module
from megatron_dppo.head.gradient import HeadGradient
from megatron_dppo.head.row_plan import RowPlan, Rows
from megatron_dppo.head.rows import VocabShard

WIDTH, HIDDEN, LENGTH = 40, 12, 23


def accumulate(
    dtype: torch.dtype, chunk: int, rows: Rows, main_grad: torch.Tensor | None, *, rounded: bool, bias: bool
) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
    """The gradients, and what they are by whole products in float64."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(WIDTH, HIDDEN, generator=generator).to(dtype)
    hidden = torch.randn(LENGTH, HIDDEN, generator=generator).to(dtype)
    dlogits = torch.randn(LENGTH, WIDTH, generator=generator).to(dtype)
    head = VocabShard.of(hidden, weight, torch.zeros(WIDTH, dtype=dtype) if bias else None, None, WIDTH, 1.0)
    gradient = HeadGradient(head, rows, hidden, (True, True, bias), chunk, main_grad, round_weight_gradient=rounded)
    for part in rows.chunks(chunk, rows.num_gradient):
        logits = torch.zeros(part.stop - part.start, WIDTH, dtype=head.dtype)
        out = gradient.next_output(logits)
        out.copy_(dlogits[part.start : part.stop])
        gradient.add(out)
    count = rows.num_gradient
    wide, source = dlogits[:count].double(), rows.take(hidden, 0, count).double()
    return list(gradient.result()), [wide @ weight.double(), wide.t() @ source, wide.sum(0)]


@pytest.mark.parametrize("into_main_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(("room", "chunk"), [(4, 2), (6, 3), (5, 5), (8, 4), (100, 7), (23, 23)])
@pytest.mark.parametrize("planned", [False, True])
def test_gradients_of_many_rooms_are_those_of_whole_products(
    room: int, chunk: int, dtype: torch.dtype, into_main_grad: bool, planned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """23 rows, or 11 of a plan, leave a remainder in most rooms and chunks."""
    monkeypatch.setattr(gradient_module, "gradient_rows", lambda *_: room)
    monkeypatch.setattr(gradient_module, "bf16_products_are_fast", lambda: True)
    products: list[int] = []
    add = gradient_module.WeightGradient.add

    def counted(self: Any, dlogits: torch.Tensor, hidden: torch.Tensor) -> None:
        products.append(len(dlogits))
        add(self, dlogits, hidden)

    monkeypatch.setattr(gradient_module.WeightGradient, "add", counted)
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(1))
    rows = Rows(LENGTH, RowPlan(order[:15], 11) if planned else None)
    for rounded in (False, True):
        # A weight in float64 has no main_grad.
        main_grad = torch.ones(WIDTH, HIDDEN) if into_main_grad and dtype != torch.float64 else None
        result, expected = accumulate(dtype, chunk, rows, main_grad, rounded=rounded, bias=True)
        half = dtype in (torch.bfloat16, torch.float16)
        # Rooms are full before they are multiplied: a product for each chunk would give the same numbers, later.
        assert len(products) == math.ceil(rows.num_gradient / (room if half else chunk))
        products.clear()
        stored = 1e-2 if dtype == torch.bfloat16 else 2e-3 if half else 1e-5
        # Rounding is for bf16 alone: fp32 and fp16 add exact products up in fp32.
        added = 2e-2 if dtype == torch.bfloat16 and rounded else 1e-5
        for name, got, want in zip(("hidden", "weight", "bias"), result, expected, strict=True):
            tolerance = stored
            if name == "weight" and main_grad is not None:
                assert got is None
                got, tolerance = main_grad - 1, added
            assert got is not None and got.shape == want.shape
            error = float((got.double() - want).abs().max() / want.abs().max())
            assert error < tolerance, (name, rounded, error)
