"""Sums of a Top-K set over shards against float64 over the whole vocabulary, with all shards on one rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.head import sums as sums_module
from megatron_dppo.head.row_kernels import row_statistics_torch
from megatron_dppo.head.row_plan import RowPlan, Rows
from megatron_dppo.head.rows import RowTotals
from megatron_dppo.head.sums import joined, merge_narrow, narrow, reduce_slots
from megatron_dppo.types import LossOutput, Metric

VOCAB, ROWS, SLOTS = 23, 7, 5
SPLITS = [[23], [12, 11], [4, 9, 0, 10]]
"""Sizes of the shards. One may be empty: padding alone."""
LABEL_IS_AN_ID, NO_IDS, EMPTY_SHARD, FAR = 1, 2, 3, 4
"""Rows with something special."""


def row_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Logits, labels, ids (-1 = unused slot), which ids are valid, and log-probabilities of the rollout."""
    generator = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(ROWS, VOCAB, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    order = torch.rand(ROWS, VOCAB, generator=generator).argsort(1)
    ids = torch.stack([row[row != label][:SLOTS] for row, label in zip(order, labels, strict=True)])
    ids[0, 2] = -1
    ids[LABEL_IS_AN_ID, 3] = labels[LABEL_IS_AN_ID]
    ids[NO_IDS] = -1
    logits[EMPTY_SHARD, 12:] = -math.inf
    labels[EMPTY_SHARD] = 3
    # The largest logit and the label are on different shards, far from each other.
    logits[FAR, 20] = 60.0
    labels[FAR] = 1
    rollout_logprobs = -3 * torch.rand(ROWS, SLOTS, generator=generator, dtype=torch.float64)
    return logits, labels, ids, ids >= 0, rollout_logprobs


def slot_sums(logprobs: Tensor, rollout_logprobs: Tensor, valid: Tensor) -> Tensor:
    """Sum of pi, and of |pi - mu|."""
    pi, mu = logprobs.exp(), rollout_logprobs.exp()
    return torch.stack([torch.where(valid, value, 0.0).sum(1) for value in (pi, (pi - mu).abs())], 1)


def shards(
    logits: Tensor, labels: Tensor, ids: Tensor, split: list[int], temperature: float
) -> list[tuple[Tensor, Tensor]]:
    """Statistics of each shard, and which slots are of it."""
    result, start = [], 0
    for size in split:
        local = [torch.where((x >= start) & (x < start + size), x - start, -1) for x in (labels, ids)]
        part = logits[:, start : start + size]
        result.append((row_statistics_torch(part, size, *local, temperature, True), local[1] >= 0))
        start += size
    return result


def reduce_all(
    parts: list[tuple[Tensor, Tensor]],
    rollout_logprobs: Tensor,
    totals: RowTotals,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """``reduce_slots`` of every shard; the all-reduce adds up what all of them gave in a first pass."""
    given: list[Tensor] = []
    group: Any = object()

    def reduce_part(part: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        return reduce_slots(*part, rollout_logprobs, totals, temperature, group, slot_sums)

    monkeypatch.setattr(sums_module.dist, "all_reduce", lambda tensor, group: given.append(tensor.clone()))
    for part in parts:
        reduce_part(part)
    total = torch.stack(given).sum(0)
    monkeypatch.setattr(sums_module.dist, "all_reduce", lambda tensor, group: tensor.copy_(total))
    return [reduce_part(part) for part in parts]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("split", SPLITS)
def test_totals_and_sums_of_all_shards_are_those_of_the_whole_row(
    split: list[int], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, labels, ids, valid, rollout_logprobs = row_inputs()
    parts = shards(logits, labels, ids, split, temperature)
    totals = merge_narrow(torch.stack([narrow(part, labels, ids, valid) for part, _ in parts]), temperature)
    reduced = reduce_all(parts, rollout_logprobs, totals, temperature, monkeypatch)
    expected = torch.log_softmax(logits / temperature, 1)
    for row in range(ROWS):
        p = expected[row].exp().tolist()
        assert float(totals.maximum[row]) == float(logits[row].max())
        z = ((logits[row] - logits[row].max()) / temperature).exp().sum()
        assert float(totals.total[row]) == pytest.approx(float(z), rel=1e-12)
        assert float(totals.logprobs[row]) == pytest.approx(float(expected[row, labels[row]]), rel=1e-12)
        assert float(totals.entropy[row]) == pytest.approx(-sum(q * math.log(q) for q in p if q > 0), rel=1e-9)
        slots = [(p[ids[row, k]], math.exp(rollout_logprobs[row, k])) for k in range(SLOTS) if valid[row, k]]
        outside = set(range(VOCAB)) - {int(labels[row]), *(int(i) for i in ids[row] if i >= 0)}
        for sums, other, square in reduced:
            assert square is not None
            assert float(sums[row, 0]) == pytest.approx(sum(pi for pi, _ in slots), rel=1e-12)
            assert float(sums[row, 1]) == pytest.approx(sum(abs(pi - mu) for pi, mu in slots), rel=1e-12)
            assert float(other[row]) == pytest.approx(math.log(sum(p[i] for i in outside)), rel=1e-12, abs=1e-12)
            assert float(square[row]) == pytest.approx(sum(p[i] ** 2 for i in outside), rel=1e-12)


def test_sums_without_squares_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels, ids, valid, rollout_logprobs = row_inputs()
    parts = shards(logits, labels, ids, [12, 11], 1.0)
    totals = merge_narrow(torch.stack([narrow(part, labels, ids, valid) for part, _ in parts]), 1.0)
    with_squares = reduce_all(parts, rollout_logprobs, totals, 1.0, monkeypatch)[0]
    without = reduce_all([(part[:, :-1], owned) for part, owned in parts], rollout_logprobs, totals, 1.0, monkeypatch)
    for sums, other, square in without:
        assert square is None
        torch.testing.assert_close((sums, other), with_squares[:2])


def test_a_row_of_minus_infinity_is_nan() -> None:
    logits, labels, ids, valid, _ = row_inputs()
    logits[5] = -math.inf
    parts = [narrow(part, labels, ids, valid) for part, _ in shards(logits, labels, ids, [12, 11], 1.0)]
    totals = merge_narrow(torch.stack(parts), 1.0)
    assert totals.logprobs.isnan().nonzero().flatten().tolist() == [5]
    assert totals.entropy.isnan().nonzero().flatten().tolist() == [5]


def output(rows: list[float], *, worst: float, has_divergence: bool = True) -> LossOutput:
    values = torch.tensor(rows)
    return LossOutput(
        loss_sum=values.sum(),
        num_tokens=torch.tensor(float(len(rows))),
        keep_mask=values > 2,
        metrics={
            "mean": Metric(values.sum(), torch.tensor(float(len(rows)))),
            "worst": Metric(torch.tensor(worst), kind="max"),
        },
        logprobs=values,
        entropy=2 * values,
        divergence=3 * values if has_divergence else None,
    )


def test_outputs_of_chunks_are_added_and_their_rows_are_those_of_the_plan() -> None:
    rows = Rows(6, RowPlan(torch.tensor([4, 0, 5]), 2))
    result = joined([output([1.0, 2.0], worst=7.0), output([4.0], worst=5.0)], rows)
    assert (float(result.loss_sum), float(result.num_tokens)) == (7.0, 3.0)
    mean, worst = result.metrics["mean"], result.metrics["worst"]
    assert (float(mean.numerator), float(mean.denominator)) == (7.0, 3.0)
    assert (float(worst.numerator), worst.kind) == (7.0, "max")
    spread = torch.tensor([2.0, 0, 0, 0, 1.0, 4.0])
    for factor, column in zip((1, 2, 3), (result.logprobs, result.entropy, result.divergence), strict=True):
        assert column is not None and column.tolist() == (factor * spread).tolist()
    assert result.keep_mask is not None and result.keep_mask.tolist() == [False] * 5 + [True]
    # A column that a chunk lacks is left out.
    partial = joined([output([1.0, 2.0], worst=0.0), output([4.0], worst=0.0, has_divergence=False)], rows)
    assert partial.divergence is None and partial.logprobs is not None
