"""TRM and CPPO by hand: whole sequences, and the budgets of prefixes."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.losses import policy_loss
from megatron_dppo.losses.sequences import percentile_90, prefix_keep_mask, sequence_keep_mask
from megatron_dppo.types import LossInputs

INF, NAN = float("inf"), float("nan")


def test_a_sequence_is_masked_by_its_largest_or_mean_divergence() -> None:
    peak = torch.tensor([0.1, 0.05, 9.0, 0.02, 0.03, NAN, 0.0])
    mask = torch.tensor([True, True, False, True, True, True, True])
    ids = torch.tensor([0, 1, 1, 2, 2, 3, 4])
    keep = sequence_keep_mask(peak, peak, mask, ids, 0.05, INF)
    assert keep.tolist() == [False, True, True, True, True, False, True]  # on the limit; 9.0 does not count
    keep = sequence_keep_mask(peak, peak, mask, ids, INF, 0.025)
    assert keep.tolist() == [False, False, False, True, True, False, True]


def test_prefix_budgets_of_a_worked_sequence() -> None:
    """w = 1, .75, .5 over three tokens; b = 90th percentile of (.02, .1, .2) = .18, at most .04.

    c_1 = .15; c_2 = min(.15, .15 + .04 - .1) = .09; c_3 = .15 + .04 * 1.75 - .1 - .15 = -.03. Z = .1, .15, .01.
    """
    divergence = torch.tensor([0.1, 7.0, 0.2, 0.02], dtype=torch.float64)
    mask = torch.tensor([True, False, True, True])
    ones, ids = torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)

    def keep(advantages: torch.Tensor, direction: torch.Tensor, sequence_ids: torch.Tensor = ids) -> list[bool]:
        regions = {"thresholds": (0.15, 0.15), "floor": 0.5, "budget": (0.02, 0.04)}
        return prefix_keep_mask(divergence, direction, advantages, mask, sequence_ids, **regions)[mask].tolist()  # type: ignore[arg-type]

    assert keep(ones, ones) == [True, False, False]
    assert keep(-ones, -ones) == [True, False, False]
    assert keep(ones, -ones) == keep(0 * ones, ones) == [True] * 3  # back to mu, or no gradient
    # The last token is a sequence of its own: nothing is spent. The one before it has w = .5 now, Z = .1 > c = .09.
    assert keep(ones, ones, torch.tensor([0, 0, 0, 1])) == [True, False, True]
    with pytest.raises(ValueError, match="next to each"):
        keep(ones, ones, torch.tensor([0, 1, 0, 1]))


def test_float64_is_compared_in_float64() -> None:
    """Limits and weights that fp32 cannot hold: what is on a limit is kept, a billionth beyond it is dropped."""
    one, mask, ids = torch.ones(1, dtype=torch.float64), torch.tensor([True]), torch.tensor([0])

    def keep(divergence: float, threshold: float) -> bool:
        limits = {"thresholds": (threshold, threshold), "floor": 1.0, "budget": (1.0, 1.0)}
        return bool(prefix_keep_mask(divergence * one, one, one, mask, ids, **limits))  # type: ignore[arg-type]

    def ipo(moved: float, threshold: float) -> bool:
        config = LossConfig(name="ipo", divergence_threshold_low=threshold, divergence_threshold_high=threshold)
        inputs = LossInputs(
            logprobs=((0.5 + moved) * one).log(), rollout_logprobs=(0.5 * one).log(), advantages=one, loss_mask=mask
        )
        return bool(policy_loss(inputs, config).keep_mask)

    for threshold in (0.15, 0.3, 0.35):
        assert keep(threshold, threshold) and not keep(threshold + 5e-9, threshold)
        assert ipo(threshold - 1e-9, threshold) and not ipo(threshold + 1e-9, threshold)
    # w = 1 - .1 t / 3 at position t: 1, .96667, .93333, .9.
    tokens, last = torch.zeros(4, dtype=torch.float64), 0.5 / (1 - 0.2 / 3)
    for beyond, kept in ((-1e-9, True), (1e-9, False)):
        tokens[2] = last * (1 + beyond)
        limits = {"thresholds": (0.5, 0.5), "floor": 0.9, "budget": (1.0, 1.0)}
        ones = torch.ones(4, dtype=torch.float64)
        result = prefix_keep_mask(tokens, ones, ones, ones.bool(), torch.zeros(4, dtype=torch.int64), **limits)  # type: ignore[arg-type]
        assert bool(result[2]) is kept


def test_the_percentile_lies_between_two_values_of_the_sequence() -> None:
    values = torch.tensor([3.0, INF, 1.0, 2.0], dtype=torch.float64)  # infinity: outside the mask
    assert float(percentile_90(values, torch.tensor(2))) == pytest.approx(2.8)  # numpy.quantile([1, 2, 3], 0.9)


def test_a_nan_divergence_masks_only_later_tokens_of_its_sequence() -> None:
    divergence = torch.tensor([0.0, NAN, 0.0, 0.0, 0.0])
    ones, mask = torch.ones(5), torch.ones(5, dtype=torch.bool)
    result = prefix_keep_mask(
        divergence, ones, ones, mask, torch.tensor([0, 0, 0, 1, 1]), thresholds=(1, 1), floor=1.0, budget=(0.1, 0.1)
    )
    assert result.tolist() == [True, False, False, True, True]


def test_without_tokens_there_is_nothing_to_keep() -> None:
    empty, no_mask, no_ids = torch.zeros(0), torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.int64)
    limits = {"thresholds": (0.1, 0.1), "floor": 0.8, "budget": (0.02, 0.04)}
    assert prefix_keep_mask(empty, empty, empty, no_mask, no_ids, **limits).shape == (0,)  # type: ignore[arg-type]
    assert sequence_keep_mask(empty, empty, no_mask, no_ids, 1.0, 1.0).shape == (0,)


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        # log r = log 1.2 = .182: (log r)^2 / 2 = .0166, r - 1 - log r = .0177; the other sequence is on-policy.
        (LossConfig(name="trm", sequence_max=0.017, sequence_mean="off"), True),
        (LossConfig(name="trm", sequence_max=0.016, sequence_mean="off"), False),
        (LossConfig(name="trm", sequence_max="off", sequence_mean=0.0089), True),
        (LossConfig(name="trm", sequence_max="off", sequence_mean=0.0088), False),
    ],
)
def test_trm_takes_the_two_estimates_of_the_divergence(config: LossConfig, kept: bool) -> None:
    inputs = LossInputs(
        logprobs=torch.tensor([0.6, 0.5, 0.7], dtype=torch.float64).log().requires_grad_(),
        rollout_logprobs=torch.tensor([0.5, 0.5, 0.7], dtype=torch.float64).log(),
        advantages=torch.ones(3),
        loss_mask=torch.ones(3, dtype=torch.bool),
        sequence_ids=torch.tensor([0, 0, 1]),
    )
    output = policy_loss(inputs, config)
    assert output.keep_mask.tolist() == [kept, kept, True] and int(output.num_tokens) == 3
    output.loss_sum.backward()
    expected = torch.tensor([-1.2 * kept, -1.0 * kept, -1.0], dtype=torch.float64)
    torch.testing.assert_close(inputs.logprobs.grad, expected)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "trm", "sequence_max": "off", "sequence_mean": "off"}, "trm would mask"),
        ({"name": "cppo", "divergence": "sampled"}, "should be 'binary' or 'topk'"),
        ({"name": "cppo", "prefix_budget_max": 0.01}, "is above prefix_budget_max"),
        ({"name": "grpo", "divergence": "topk"}, "divergence = topk"),
        ({"name": "grpo", "prefix_budget": 0.1}, "prefix_budget = 0.1 has no effect"),
        ({"name": "cppo", "sequence_max": "off"}, "sequence_max = off"),
    ],
)
def test_invalid_keys_are_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossConfig(**keys)  # type: ignore[arg-type]


def _plain_prefix_mask(
    divergence: list[float], outward: list[bool], delta: list[float], *, floor: float, budget: tuple[float, float]
) -> list[bool]:
    """Equations 8 to 10 and 22 of arXiv 2606.10968 for the tokens of one sequence that count, one after the other."""
    last = len(divergence) - 1
    mean = min(max(float(numpy.quantile(divergence, 0.9)), budget[0]), budget[1])
    spent = weights = 0.0
    keep = []
    for t, moved in enumerate(divergence):
        weight = 1 - (1 - floor) * t / last if last else 1.0
        keep.append(not outward[t] or weight * moved <= min(delta[t], delta[t] + mean * weights - spent))
        spent += weight * moved
        weights += weight
    return keep


def test_prefix_budgets_of_random_sequences_are_those_of_the_formulas() -> None:
    """Sequences with tokens of tools at any position; the percentile is mostly inside the budget's limits."""
    random = numpy.random.default_rng(0)
    num_kept = num_tokens = 0
    for _ in range(200):
        lengths = random.integers(1, 40, 3)
        count = int(lengths.sum())
        ids = numpy.repeat(numpy.arange(3), lengths)
        # Some sequences have few large divergences, so that their percentile is below the smallest budget.
        divergence = 0.2 * random.random(count) ** random.choice([1, 12], 3)[ids]
        sign, advantages = random.choice([-1.0, 1.0], (2, count))
        mask = random.random(count) < 0.7
        columns = [torch.from_numpy(x) for x in (divergence, sign, advantages, mask, ids)]
        limits: dict[str, Any] = {"floor": 0.4, "budget": (0.07, 0.16)}
        result = prefix_keep_mask(*columns, thresholds=(0.05, 0.15), **limits).numpy()
        for sequence in range(3):
            chosen = mask & (ids == sequence)
            if not chosen.any():
                continue
            outward = (advantages * sign > 0)[chosen].tolist()
            delta = numpy.where(advantages > 0, 0.15, 0.05)[chosen].tolist()
            assert result[chosen].tolist() == _plain_prefix_mask(divergence[chosen].tolist(), outward, delta, **limits)
            num_tokens += sum(outward)
            num_kept += int(result[chosen][outward].sum())
    assert 0.1 < 1 - num_kept / num_tokens < 0.5
