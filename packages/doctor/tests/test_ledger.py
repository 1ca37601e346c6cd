"""The arithmetic of the ledger on a chain worked by hand."""

from __future__ import annotations

import json

import pytest
import torch

from megatron_dppo_doctor.diagnose.ledger import Cause, CauseScoring, format_ledger, make_ledger

TRAINED = torch.tensor([-1.0, -2.0, -0.5, -3.0])
CHAIN = [
    CauseScoring(Cause.STALENESS, torch.tensor([-1.2, -2.0, -0.9, -2.5])),
    CauseScoring(Cause.UNEXPLAINED, torch.tensor([-1.2, -2.01, -0.9, -2.5])),
    CauseScoring(Cause.ENGINE, torch.tensor([-1.1, -2.4, -0.9, -2.5])),
    CauseScoring(Cause.HEAD, torch.tensor([-1.1, -2.5, -0.9, -2.5])),
    CauseScoring(Cause.ENGINE, torch.tensor([-1.5, -2.5, -0.9, -2.5])),
]
# Differences from TRAINED to the last: .5, .5, .4, -.5. Links: staleness .2, 0, .4, -.5; unexplained 0, .01, 0, 0;
# engine -.1 + .4, .39, 0, 0; head 0, .1, 0, 0.


def test_parts_are_the_links_in_the_direction_of_the_difference_and_add_up_to_the_mean() -> None:
    ledger = make_ledger(TRAINED, CHAIN)
    assert ledger.total == pytest.approx(1.9 / 4) and ledger.signed == pytest.approx(0.9 / 4)
    assert ledger.largest == pytest.approx(0.5) and ledger.tokens == 4
    result = {row.cause: row for row in ledger.rows}
    assert result[Cause.STALENESS].part == pytest.approx((0.2 + 0 + 0.4 + 0.5) / 4)
    assert result[Cause.STALENESS].signed == pytest.approx(0.1 / 4) and result[Cause.STALENESS].size == pytest.approx(
        1.1 / 4
    )
    assert result[Cause.ENGINE].part == pytest.approx((0.3 + 0.39) / 4), "both links of one cause together"
    assert result[Cause.HEAD].part == pytest.approx(0.1 / 4) and result[Cause.HEAD].largest == pytest.approx(0.1)
    assert sum(row.part for row in ledger.rows) == pytest.approx(ledger.total, abs=1e-7)
    assert sum(row.share for row in ledger.rows) == pytest.approx(1, abs=1e-6)
    assert [row.cause for row in ledger.rows] == [Cause.STALENESS, Cause.HEAD, Cause.ENGINE, Cause.UNEXPLAINED]


def test_it_closes_when_what_is_unexplained_is_small_against_the_total_also_where_it_cancels() -> None:
    assert make_ledger(TRAINED, CHAIN).closes
    off = torch.tensor([0.1, -0.1, 0.1, -0.1])
    chain = [
        CHAIN[0],
        CauseScoring(Cause.UNEXPLAINED, CHAIN[0].logprobs + off),
        CauseScoring(Cause.ENGINE, CHAIN[0].logprobs),
    ]
    ledger = make_ledger(TRAINED, chain)
    assert sum(row.signed for row in ledger.rows if row.cause == Cause.UNEXPLAINED) == pytest.approx(0, abs=1e-7)
    assert ledger.closes is False and "closes: NO" in format_ledger(ledger)


def test_rounding_alone_closes_and_without_a_residual_nobody_knows() -> None:
    tiny = make_ledger(TRAINED, [CauseScoring(Cause.UNEXPLAINED, TRAINED + 1e-6)])
    assert tiny.closes and "rounding" in format_ledger(tiny)
    unknown = make_ledger(TRAINED, [CauseScoring(Cause.NOT_SEPARATED, TRAINED - 1)], {Cause.HEAD: "not separable"})
    assert (
        unknown.closes is None
        and "closes: unknown" in format_ledger(unknown)
        and "head precision: not separable" in format_ledger(unknown)
    )
    plain = json.loads(json.dumps(unknown.to_json()))
    assert plain["causes"][Cause.NOT_SEPARATED]["part"] == pytest.approx(1) and plain["not_separated"] == {
        Cause.HEAD: "not separable"
    }


def test_other_lengths_and_numbers_that_are_not_finite_are_refused() -> None:
    for wrong in (torch.zeros(3), torch.tensor([0.0, 0.0, 0.0, -torch.inf])):
        with pytest.raises(ValueError, match="expected 4 finite"):
            make_ledger(TRAINED, [CauseScoring(Cause.ENGINE, wrong)])
    with pytest.raises(ValueError, match="needs tokens"):
        make_ledger(TRAINED[:0], CHAIN)
