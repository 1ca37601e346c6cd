"""Counts of what a mask removed, by hand, and the masks of other losses against their rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from megatron_dppo.report.steps.tokens import StepTokens
from megatron_dppo_report.masks import MaskCounts, token_kinds
from megatron_dppo_report.reported_run import other_masks

TEXTS = {0: "<end>", 1: " 42", 2: "word", 3: "\\boxed{", 4: " = ", 5: "é", 6: "x1"}


def decode(ids: Sequence[int]) -> list[str]:
    return [TEXTS[i] for i in ids]


def a_step() -> StepTokens:
    """Two responses: ten tokens that end with the end token, and five that the limit cut."""
    ids = np.array([2, 2, 2, 1, 2, 4, 3, 5, 1, 0, 2, 2, 6, 4, 2], dtype=np.int32)
    masked = np.zeros(15, dtype=bool)
    masked[[3, 5, 9, 12]] = True
    pi = np.full(15, 0.5, dtype=np.float32)
    mu = np.full(15, 0.5, dtype=np.float32)
    mu[[3, 5]], mu[9], mu[12] = 0.25, 0.05, 0.9
    rows = [
        {"finish_reason": "stop", "reward": 1.0, "update": 0},
        {"finish_reason": "length", "reward": 0.0, "update": 1},
    ]
    return StepTokens(
        ids=ids,
        sample=np.array([0] * 10 + [1] * 5, dtype=np.int32),
        trained=np.array([True] * 14 + [False]),
        masked=masked,
        pi=pi,
        mu=mu,
        advantages=np.array([1.0] * 10 + [-2.0] * 5, dtype=np.float32),
        ages=np.array([0] * 10 + [2] * 5, dtype=np.int32),
        given=np.zeros(len(ids), dtype=np.bool_),
        starts=np.array([0, 10, 15]),
        rows=rows,  # type: ignore[arg-type]
    )


def test_kinds_are_by_position_first_and_then_by_text() -> None:
    first, last = ["first tokens"] * 3, ["last tokens"] * 3
    middle = ["digits", "words", "format", "format"]
    assert token_kinds(a_step(), decode).tolist() == [
        *(*first, *middle, *last[:2], "end token"),
        *(*first, *last[:2]),
    ]
    assert token_kinds(a_step(), None).tolist()[3:7] == ["not decoded"] * 4


def test_counts_of_two_steps_add_up() -> None:
    counts = MaskCounts()
    for _ in range(2):
        counts.add(a_step(), decode, 5.0, None)
    view = counts.view()
    assert view is not None
    assert (view["masked"], view["tokens"]) == (8, 28)  # the last token was not trained
    assert view["kinds"] == [
        ["end token", 2, 2, 0, 0],
        ["first tokens", 0, 6, 2, 6],
        ["last tokens", 0, 4, 0, 2],
        ["digits", 2, 2, 0, 0],
        ["words", 0, 2, 0, 0],
        ["format", 2, 4, 0, 0],
    ]
    assert view["ages"] == [["0", 6, 20], ["2", 2, 8]]
    # Masked: 2 and 2 of ratio 2, one of ratio 10 that the cap limits to 5, and 2 * .5 / .9 with A = -2.
    removed = 2 + 2 + 5 + 2 * 0.5 / 0.9
    assert view["gradient"] == pytest.approx(removed / (removed + 7 + 3 * 2), abs=1e-4)
    assert MaskCounts().view() is None


def test_other_losses_are_judged_on_the_same_tokens() -> None:
    step = a_step()
    masks = other_masks("dppo_binary_tv", step)
    assert "dppo_binary_tv" not in masks and "dppo_topk_tv" not in masks and "minirl" not in masks
    grpo = [(p / m > 1.28 if a > 0 else p / m < 0.8) for p, m, a in zip(step.pi, step.mu, step.advantages, strict=True)]
    assert masks["grpo"].tolist() == [bool(x) and bool(t) for x, t in zip(grpo, step.trained, strict=True)]
    ipo = (np.abs(step.pi - step.mu) > 0.3) & step.trained
    assert masks["ipo"].tolist() == ipo.tolist()
    assert not masks["pg_is"].any()
    assert masks["gspo"].tolist()[:10] == [True] * 10, "the first sequence has gone up by more than 4e-4"
    counts = MaskCounts()
    counts.add(step, decode, 5.0, lambda each: other_masks("dppo_binary_tv", each))
    assert counts.other_losses["grpo"] == [int(masks["grpo"].sum()), int((masks["grpo"] & step.masked).sum())]


def test_m2po_is_judged_on_the_tokens_of_an_update() -> None:
    """In the first update log r is log 2 twice and log 10, outward; in the second log(.5 / .9) alone, outward.

    Squares .48, .48, 5.3 and a limit of .04 leave none of the first, and .35 none of the second.
    """
    step = a_step()
    masked = other_masks("dppo_binary_tv", step)["m2po"]
    assert masked.nonzero()[0].tolist() == [3, 5, 9, 12]
    # The seven other tokens of the first update move a little.
    fresh = step.pi.copy()
    fresh[:10][step.pi[:10] == step.mu[:10]] *= 1.0001
    many = replace(step, pi=fresh)
    outward = 7 * math.log(1.0001) ** 2
    assert (outward + math.log(2) ** 2) / 8 > 0.04, "so that not even one of the squares fits"
    assert other_masks("dppo_binary_tv", many)["m2po"].nonzero()[0].tolist() == [3, 5, 9, 12]
    near = step.mu.copy()
    near[12] = 0.686  # a square of .1: alone in its update it is too large, among all tokens of the step it would fit
    near[[3, 5]] = 0.4  # log 1.25, whose square is .0498: with seven near 0 both fit, .0111 on average
    assert other_masks("dppo_binary_tv", replace(many, mu=near))["m2po"].nonzero()[0].tolist() == [9, 12]


def test_the_view_compares_other_losses_with_the_run_s_mask() -> None:
    step = a_step()
    counts = MaskCounts()
    counts.add(step, decode, 5.0, lambda _: {"other": np.arange(15) % 3 == 0})
    view = counts.view()
    assert view is not None
    # Tokens 0, 3, 6, 9, 12; the last of the step was not trained. Of these 3, 9 and 12 were masked.
    assert view["others"] == [["other", 5, 3]]
