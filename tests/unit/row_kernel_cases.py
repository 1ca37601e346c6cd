"""The Triton statistics of a row against float64: cases for interpret_row_kernels.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

FP32, BF16 = torch.float32, torch.bfloat16
BLOCK = 2048
INF, NAN = math.inf, math.nan


def statistics(*arguments: object) -> Tensor:
    from megatron_dppo.head.row_kernels_triton import row_statistics

    return row_statistics(*arguments)  # type: ignore[arg-type]


def reference_statistics(
    logits: Tensor, own: int, labels: Tensor, ids: Tensor | None, temperature: float, squares: bool = False
) -> Tensor:
    """Row by row in float64, the set's entries deleted before the last sum."""
    rows = []
    for r, x in enumerate(logits[:, :own].double()):
        places = [int(labels[r]), *([] if ids is None else ids[r].tolist())]
        m = max(x.tolist(), default=-INF)
        z = (x - m) / temperature if m > -INF else torch.full_like(x, -INF)
        finite = z[z > -INF]
        other = _outside(z, places).exp()
        at = [float(z[p]) if p >= 0 else -INF for p in places]
        last = [float(other.square().sum())] if squares else []
        rows.append([m, float((finite * finite.exp()).sum()), float(other.sum()), *at, *last])
    return torch.tensor(rows, dtype=torch.float64)


def _outside(z: Tensor, places: list[int]) -> Tensor:
    keep = torch.ones_like(z, dtype=torch.bool)
    keep[[p for p in places if p >= 0]] = False
    return z[keep]


def close(result: Tensor, expected: Tensor, relative: float, absolute: float = 0.0) -> None:
    assert result.shape == expected.shape
    torch.testing.assert_close(result.double(), expected.double(), rtol=relative, atol=absolute, equal_nan=True)


def normal(rows: int, width: int, dtype: torch.dtype, seed: int = 0, scale: float = 4.0) -> Tensor:
    return (scale * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))).to(dtype)


def places(rows: int, own: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A label and k distinct ids a row in random order; some are -1, and some rows have the label among the ids."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, own, (rows,), generator=g)
    ids = torch.stack([torch.randperm(own, generator=g)[:k] for _ in range(rows)])
    ids = torch.nn.functional.pad(ids, (0, k - ids.shape[1]), value=-1)
    if k > 1:
        ids[::2, k // 2] = labels[::2].where(~(ids[::2] == labels[::2, None]).any(1), -1)
        ids[1::3, ::3] = -1
    labels[-1] = -1
    return labels, ids


def statistics_match_float64_for_every_width_dtype_and_number_of_ids() -> None:
    for width, own, k in (
        (1, 1, 1),
        (7, 3, 2),
        (BLOCK - 1, BLOCK - 1, 16),
        (BLOCK, BLOCK, 17),
        (BLOCK + 1, BLOCK + 1, 64),
        (2 * BLOCK, BLOCK + 5, 128),
        (3 * BLOCK + 64, 3 * BLOCK + 37, 64),
    ):
        for dtype, temperature in ((FP32, 0.7), (BF16, 1.3)):
            logits = normal(3, width, dtype)
            labels, ids = places(3, own, k)
            for some in (ids, None):
                result = statistics(logits, own, labels, some, temperature)
                assert result.dtype == FP32
                close(result, reference_statistics(logits, own, labels, some, temperature), 1e-6, 1e-6)
                squares = statistics(logits, own, labels, some, temperature, True)
                assert torch.equal(squares[:, :-1], result)
                close(squares, reference_statistics(logits, own, labels, some, temperature, True), 1e-6, 1e-6)
            assert torch.equal(result, statistics(logits, own, labels, ids[:, :0], temperature))


def statistics_match_float64_for_the_largest_vocabulary() -> None:
    logits = normal(2, 151936, FP32)
    labels, ids = places(2, 151936, 64)
    close(statistics(logits, 151936, labels, ids, 1.0), reference_statistics(logits, 151936, labels, ids, 1.0), 2e-6)


def ids_at_the_ends_of_blocks_are_found_in_any_order_and_once() -> None:
    own = 2 * BLOCK + 9
    logits = normal(1, own, FP32, scale=1.0)
    ends = [0, 3, 4, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK, own - 1]
    labels = torch.tensor([BLOCK])
    expected = reference_statistics(logits, own, labels, torch.tensor([ends]), 1.0)
    for order in (ends, ends[::-1], ends[4:] + ends[:4]):
        result = statistics(logits, own, labels, torch.tensor([order]), 1.0)
        close(result[:, :4], expected[:, :4], 1e-6)
        for place, y in zip(order, result[0, 4:], strict=True):
            close(y, expected[0, 4 + ends.index(place)], 1e-6)
    twice = statistics(logits, own, labels, torch.tensor([ends + ends]), 1.0)
    close(twice[:, :4], expected[:, :4], 1e-6)


def the_mass_outside_the_set_is_added_up_and_not_subtracted() -> None:
    logits = normal(2, 5000, FP32, scale=1.0) - 60.0
    labels, ids = torch.tensor([4000, 7]), torch.arange(0, 4800, 300).repeat(2, 1)
    logits.scatter_(1, ids, 5.0)
    expected = reference_statistics(logits, 5000, labels, ids, 1.0)
    assert float(expected[:, 2].max()) < 1e-20
    close(statistics(logits, 5000, labels, ids, 1.0), expected, 2e-5)
    logits = logits.clamp(min=-30.0)  # squares of e^-65 are 0 in fp32
    expected = reference_statistics(logits, 5000, labels, ids, 1.0, True)
    close(statistics(logits, 5000, labels, ids, 1.0, True), expected, 2e-5)


def a_set_of_everything_leaves_exactly_nothing() -> None:
    result = statistics(normal(2, 64, BF16), 64, torch.tensor([3, -1]), torch.arange(64).repeat(2, 1), 1.0)
    assert result[:, 2].tolist() == [0.0, 0.0]


def rows_of_extreme_logits_match_float64() -> None:
    own = 2 * BLOCK + 100
    base = normal(10, own, FP32)
    base[0] -= 1e4
    base[1] -= 1e30
    base[2] += 1e6
    base[3] = torch.linspace(-900, 900, own)
    base[4] = torch.linspace(900, -900, own)
    base[5, : own - 3] = -INF
    base[6, ::2] = -INF
    base[7, 1:] = -INF
    base[8] = -3e38
    base[8, BLOCK] = 3e38
    base[9] = -1e5
    labels, ids = places(10, own, 20)
    for dtype in (FP32, BF16):
        logits = base.to(dtype)
        result = statistics(logits, own, labels, ids, 0.9)
        expected = reference_statistics(logits, own, labels, ids, 0.9)
        squares = statistics(logits, own, labels, ids, 0.9, True)
        assert torch.equal(squares[:, :-1].nan_to_num(7.0), result.nan_to_num(7.0))
        expected_squares = reference_statistics(logits, own, labels, ids, 0.9, True)[:, -1]
        close(squares[[0, 1, 2, 3, 4, 5, 6, 7, 9], -1], expected_squares[[0, 1, 2, 3, 4, 5, 6, 7, 9]], 3e-5, 1e-6)
        # The last place of the reference's z at 900 is beyond fp32; at 3e38 - (-3e38) z itself is.
        close(result[:8], expected[:8], 3e-5, 1e-6)
        close(result[8, :3], expected[8, :3], 1e-6)
        close(result[9], expected[9], 3e-5, 1e-6)


def a_row_without_entries_has_no_mass_and_no_nan() -> None:
    nothing = [-INF, 0.0, 0.0, -INF, -INF, -INF]
    logits = normal(2, 3000, BF16)
    outside = torch.full((2, 2), -1)
    assert statistics(logits, 0, torch.tensor([-1, -1]), outside, 1.0).tolist() == [nothing, nothing]
    squares = statistics(logits, 0, torch.tensor([-1, -1]), outside, 1.0, True)
    assert squares.tolist() == [[*nothing, 0.0]] * 2
    empty = torch.full((2, 3000), -INF)
    assert statistics(empty, 2500, torch.tensor([-1, 9]), torch.tensor([[5, -1], [9, 2400]]), 1.0).tolist() == [
        nothing,
        nothing,
    ]


def a_nan_anywhere_gives_nan_but_no_value_to_what_is_elsewhere() -> None:
    for dtype in (FP32, BF16):
        logits = normal(5, 2 * BLOCK + 50, dtype)
        labels, ids = torch.tensor([9, 9, 9, -1, 9]), torch.tensor([[5, -1, 2 * BLOCK + 7]]).repeat(5, 1)
        for row, place in enumerate((9, 5, 2 * BLOCK + 7, 100)):
            logits[row, place] = NAN
        result = statistics(logits, 2 * BLOCK + 50, labels, ids, 1.0)
        assert result[:4, [0, 1, 2, 4, 6]].isnan().all() and result[:3, 3].isnan().all()
        assert (result[:, 5] == -INF).all() and result[3, 3] == -INF
        assert not result[4].isnan().any()


def padding_never_enters_the_statistics() -> None:
    for own in (0, 10, BLOCK, BLOCK + 1):
        logits = normal(3, 2 * BLOCK + 6, FP32)
        labels, ids = places(3, own, 4) if own else (torch.tensor([-1] * 3), None)
        plain = statistics(logits, own, labels, ids, 1.0)
        for row, value in enumerate((NAN, INF, 1e30)):
            logits[row, own:] = value
        assert torch.equal(plain, statistics(logits, own, labels, ids, 1.0))


def rows_and_columns_may_be_strided() -> None:
    wide = normal(8, 700, BF16)
    logits, (labels, ids) = wide[::2, 16:600], places(4, 584, 6)
    labels = torch.stack([labels, labels], 1)[:, 0]
    ids = ids.T.contiguous().T
    close(statistics(logits, 584, labels, ids, 1.0), reference_statistics(logits, 584, labels, ids, 1.0), 1e-6, 1e-6)


def shards_merge_to_the_whole_vocabulary() -> None:
    vocabulary, width, temperature = 5000, 2176, 0.8
    whole = normal(3, vocabulary, FP32)
    labels, ids = places(3, vocabulary, 12)
    labels[-1] = 17
    parts = []
    for first in (0, width, 2 * width, 3 * width):
        own = max(0, min(vocabulary - first, width))
        shard = torch.full((3, width), 99.0)
        shard[:, :own] = whole[:, first : first + own]
        local = [torch.where((p >= first) & (p < first + own), p - first, -1) for p in (labels, ids)]
        parts.append(statistics(shard, own, *local, temperature).double())
    rows = torch.stack(parts)
    m = rows[:, :, 0].amax(0)
    shift = ((rows[:, :, 0] - m) / temperature)[..., None]
    is_id = ((ids == labels[:, None]) & (ids >= 0)).any(1)
    logp = (whole.double() / temperature).log_softmax(1)

    exps = rows[:, :, 3:].exp()
    totals = rows[:, :, 2] + torch.where(is_id, 0.0, exps[:, :, 0]) + exps[:, :, 1:].sum(-1)
    scale = shift[..., 0].exp()
    total = (scale * totals).sum(0)
    held = totals > 0
    moment = torch.where(held, scale * (rows[:, :, 1] + shift[..., 0] * totals), 0.0).sum(0)
    close(total.log() - moment / total, -(logp.exp() * logp).sum(1), 1e-6)
    close((rows[:, :, 3] + shift[..., 0]).amax(0) - total.log(), logp.gather(1, labels[:, None])[:, 0], 1e-6)
    at_ids = (rows[:, :, 4:] + shift).amax(0) - total.log()[:, None]
    close(at_ids, logp.gather(1, ids.clamp(min=0)).where(ids >= 0, -INF), 1e-6)
    others = [_outside(r, [int(a), *i.tolist()]).logsumexp(0) for r, a, i in zip(logp, labels, ids, strict=True)]
    close((scale * rows[:, :, 2]).sum(0).log() - total.log(), torch.stack(others), 1e-6)


def bad_arguments_of_the_statistics_are_named() -> None:
    logits, labels = normal(2, 8, FP32), torch.tensor([0, -1])
    for arguments, message in (
        ((logits.double(), 8, labels, None, 1.0), "float64"),
        ((logits.T, 2, torch.zeros(8, dtype=torch.int64), None, 1.0), "contiguous rows"),
        ((logits[0], 8, labels, None, 1.0), "logits"),
        ((logits, 9, labels, None, 1.0), "shard_size = 9"),
        ((logits, 8, labels.int(), None, 1.0), "int64 labels"),
        ((logits, 8, labels[:1], None, 1.0), "int64 labels"),
        ((logits, 8, labels, labels[:1, None], 1.0), "int64 ids"),
        ((logits, 8, labels, labels[:, None].int(), 1.0), "int64 ids"),
    ):
        with pytest.raises(ValueError, match=message):
            statistics(*arguments)
    assert statistics(logits[:0], 8, labels[:0], None, 1.0).shape == (0, 4)
