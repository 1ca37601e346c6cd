"""The two passes over a chunk of logits against float64, one shard at a time, and the GEMMs before and after them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron_dppo.head import row_kernels
from megatron_dppo.head.mixed_gemm import WeightGradient, bf16_products_are_fast, logits_into
from megatron_dppo.head.row_kernels import (
    gradient_of_exponentials,
    row_gradient,
    row_statistics,
    row_statistics_torch,
)

ROWS, WIDTH, OWN, SLOTS = 9, 50, 47, 6
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
BOUND = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-6}


@pytest.fixture(params=[1 << 20, 400], ids=["one block", "blocks of some rows"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(row_kernels, "BLOCK_BYTES", request.param)
    return request.param


@pytest.fixture
def ieee() -> Iterator[None]:
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    yield
    torch.backends.mkldnn.matmul.fp32_precision = before


def chunk(dtype: torch.dtype, offset: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits with huge padding, labels and ids of this shard or -1; a row of -inf, one with holes, one without ids."""
    generator = torch.Generator().manual_seed(1)
    logits = 4 * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) + offset
    logits[1] = -math.inf
    logits[2, :30] = -math.inf
    logits[:, OWN:] = 3000.0
    labels = torch.randint(0, OWN, (ROWS,), generator=generator)
    labels[3:5] = -1
    ids = torch.rand(ROWS, OWN, generator=generator).argsort(1)[:, :SLOTS]
    ids[:, 4] = -1
    ids[4] = -1
    ids[5, 0] = labels[5]
    return logits.to(dtype), labels, ids


def expected(logits: Tensor, labels: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """With the sum of squares as the last column."""
    z = logits[:, :OWN].double()
    maximum = z.amax(1)
    z = (z - maximum.clamp(min=-1e300)[:, None]) / temperature
    chosen = torch.cat([labels[:, None], ids], 1)
    in_set = torch.zeros(ROWS, OWN + 1, dtype=torch.bool).scatter(1, torch.where(chosen >= 0, chosen, OWN), True)
    values = torch.where(chosen >= 0, z.gather(1, chosen.clamp(min=0)), -math.inf)
    weighted = (z.exp() * z.clamp(min=-1e5)).sum(1)
    outside = z.exp().masked_fill(in_set[:, :OWN], 0.0)
    columns = (maximum, weighted, outside.sum(1), *values.unbind(1), outside.square().sum(1))
    return torch.stack(columns, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_statistics_of_a_shard_equal_float64(dtype: torch.dtype, temperature: float, block: int) -> None:
    logits, labels, ids = chunk(dtype)
    before = logits.clone()
    got, want = row_statistics(logits, OWN, labels, ids, temperature), expected(logits, labels, ids, temperature)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(got.double(), want[:, :-1], rtol=BOUND[dtype], atol=BOUND[dtype])
    squares = row_statistics(logits, OWN, labels, ids, temperature, True)
    assert torch.equal(squares[:, :-1], got)
    torch.testing.assert_close(squares[:, -1].double(), want[:, -1], rtol=BOUND[dtype], atol=BOUND[dtype])
    assert torch.equal(logits, before)
    without = row_statistics(logits, OWN, labels, None, temperature)
    torch.testing.assert_close(without[:, :2], got[:, :2])
    want = expected(logits, labels, torch.full_like(ids, -1), temperature)[:, [0, 1, 2, 3, -1]]
    without = row_statistics(logits, OWN, labels, None, temperature, True)
    torch.testing.assert_close(without.double(), want, rtol=BOUND[dtype], atol=BOUND[dtype])


def test_a_shard_of_padding_and_an_empty_chunk_have_empty_statistics() -> None:
    logits, labels, ids = chunk(torch.float32)
    got = row_statistics(logits, 0, torch.full_like(labels, -1), torch.full_like(ids, -1), 1.0)
    assert (got[:, [0, 3, 4, 5, 6, 7, 8, 9]] == -math.inf).all() and (got[:, 1:3] == 0).all()
    assert row_statistics(logits[:0], OWN, labels[:0], ids[:0], 1.0).shape == (0, 4 + SLOTS)


def test_a_nan_gives_nan_in_its_row_alone() -> None:
    logits, labels, ids = chunk(torch.float32)
    logits[0, 7] = math.nan
    got = row_statistics(logits, OWN, labels, ids, 1.0)
    assert got[0, :3].isnan().all() and not got[1:].isnan().any()


def test_very_negative_logits_keep_their_differences() -> None:
    logits, labels, ids = chunk(torch.float64, offset=-30000.0)
    logits = logits.float()
    got, want = row_statistics(logits, OWN, labels, ids, 0.7), expected(logits, labels, ids, 0.7)
    torch.testing.assert_close(got.double(), want[:, :-1], rtol=2e-6, atol=2e-6)


def gradient_case(dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Totals of rows with more shards than this one: a larger maximum and sum."""
    logits, labels, _ = chunk(dtype)
    logits[1] = logits[0]
    generator = torch.Generator().manual_seed(2)
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    maximum = logits[:, :OWN].double().amax(1) + torch.rand(ROWS, generator=generator, dtype=torch.float64)
    total = ((logits[:, :OWN].double() - maximum[:, None]) / 0.6).exp().sum(1) + 1.5
    more = torch.randn(3, ROWS, generator=generator, dtype=torch.float64)
    totals = {"maximum": maximum, "total": total, "g": more[0], "e": more[1], "entropy": more[2].abs()}
    return logits, labels, {name: values.to(statistics) for name, values in totals.items()}


def expected_gradient(logits: Tensor, labels: Tensor, totals: dict[str, Tensor], with_entropy: bool) -> Tensor:
    t = {name: values.double()[:, None] for name, values in totals.items()}
    logp = (logits[:, :OWN].double() - t["maximum"]) / 0.6 - t["total"].log()
    weight = t["g"] + t["e"] * (logp.clamp(min=-1e5) + t["entropy"]) if with_entropy else t["g"]
    hot = torch.nn.functional.one_hot(labels.clamp(min=0), OWN) * (labels >= 0)[:, None]
    gradient = (hot * t["g"] - logp.exp() * weight) / 0.6
    return torch.nn.functional.pad(gradient, (0, WIDTH - OWN))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_gradient_of_the_logits_equals_float64(dtype: torch.dtype, with_entropy: bool, block: int) -> None:
    logits, labels, totals = gradient_case(dtype)
    want = expected_gradient(logits, labels, totals, with_entropy)
    e, entropy = (totals["e"], totals["entropy"]) if with_entropy else (None, None)
    for out_dtype in {dtype, torch.bfloat16}:
        for in_place in (False, True):
            source = logits.clone()
            out = source.view(out_dtype)[:, :WIDTH] if in_place else torch.full_like(source, 9.0, dtype=out_dtype)
            got = row_gradient(
                source, OWN, labels, totals["maximum"], totals["total"], totals["g"], e, entropy, 0.6, out
            )
            assert got is out and (got[:, OWN:] == 0).all()
            bound = 4e-3 if out_dtype == torch.bfloat16 else BOUND[dtype]
            torch.testing.assert_close(got.double(), want, rtol=bound, atol=bound / 100)
    assert (
        row_gradient(logits, 0, labels, totals["maximum"], totals["total"], totals["g"], e, entropy, 0.6, out) == 0
    ).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_exponentials_in_place_of_the_logits_give_the_same_gradient(dtype: torch.dtype, block: int) -> None:
    logits, labels, totals = gradient_case(dtype)
    _, _, ids = chunk(dtype)
    want = expected_gradient(logits, labels, totals, with_entropy=False)
    plain = row_statistics(logits, OWN, labels, ids, 0.6)
    for out_dtype in {dtype, torch.bfloat16}:
        source = logits.clone()
        statistics = row_statistics_torch(source, OWN, labels, ids, 0.6, overwrite=True)
        torch.testing.assert_close(statistics, plain, rtol=0, atol=0)
        out = source if out_dtype == dtype else torch.full_like(source, 9.0, dtype=out_dtype)
        got = gradient_of_exponentials(
            source, OWN, labels, statistics[:, 0], totals["maximum"], totals["total"], totals["g"], 0.6, out
        )
        bound = 4e-3 if out_dtype == torch.bfloat16 else BOUND[dtype]
        torch.testing.assert_close(got.double(), want, rtol=bound, atol=bound / 100)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gemms_add_up_in_fp32(dtype: torch.dtype, ieee: None) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, 64, generator=generator, dtype=torch.float64).to(dtype) for n in (40, 300))
    out = torch.empty(40, 300, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    logits_into(hidden, weight, None, out)
    torch.testing.assert_close(out.double(), hidden.double() @ weight.double().T, rtol=1e-5, atol=1e-5)
    total = torch.full((300, 64), 2.0, dtype=out.dtype)
    gradient = WeightGradient(weight, 2, total)
    dlogits = torch.randn(40, 300, generator=generator, dtype=torch.float64).to(dtype)
    for part in (slice(0, 25), slice(25, 40)):
        gradient.add(dlogits[part], hidden[part])
    assert gradient.result() is None
    torch.testing.assert_close(total.double(), 2.0 + dlogits.double().T @ hidden.double(), rtol=1e-5, atol=1e-5)
    assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"


@pytest.mark.parametrize("added", [False, True])
def test_a_rounded_weight_gradient_is_within_bf16_of_float64_and_is_added_in_fp32(
    added: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several blocks of the weight, the last one shorter.
    monkeypatch.setattr("megatron_dppo.head.mixed_gemm.BLOCK_ENTRIES", 64 * 64)
    generator = torch.Generator().manual_seed(4)
    hidden, dlogits = (torch.randn(40, n, generator=generator).bfloat16() for n in (64, 300))
    # So large that a sum in bf16 would lose the second chunk, which is 1/300 of the first.
    dlogits[25:] /= 300
    total = torch.full((300, 64), 2.0) if added else None
    weight = torch.empty(300, 64, dtype=torch.bfloat16)
    gradient = WeightGradient(weight, 2, total, rounded=True)
    parts = [slice(0, 25), slice(25, 40)]
    for part in parts:
        gradient.add(dlogits[part], hidden[part])
    products = [dlogits[part].double().T @ hidden[part].double() for part in parts]
    result = gradient.result()
    if total is None:
        assert result is not None and result.dtype == torch.bfloat16
        return torch.testing.assert_close(result.double(), sum(products), rtol=1e-2, atol=1e-2)
    assert result is None
    difference = total.double() - 2.0 - products[0].bfloat16().double()
    assert float((difference - products[1]).norm() / products[1].norm()) < 5e-3


@pytest.mark.parametrize(
    ("capabilities", "fast"),
    [
        ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": False}, False),
        ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": True}, True),
        ({"cpu_name": "AMD EPYC 9R14", "avx512_bf16": True, "amx_bf16": False}, True),
        ({"cpu_name": "AMD EPYC 7R13", "avx512_bf16": False}, False),
        ({}, False),
    ],
)
def test_bf16_products_are_taken_where_they_are_fast(
    capabilities: dict[str, object], fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert bf16_products_are_fast.__wrapped__() == fast
