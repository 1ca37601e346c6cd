"""Scores of held-out answers against counts over all subsets."""

from __future__ import annotations

from itertools import combinations
from statistics import mean

import pytest

from columns import ids
from megatron_dppo.report.metrics import reduce_metrics
from megatron_dppo.run.evaluation import eval_metrics, majority_score, pass_at_k
from megatron_dppo.types import Completion, Prompt, Rollout, RolloutGroup


def group(*answers: tuple[str, float]) -> RolloutGroup:
    prompt = Prompt(prompt_id="0", text="q", token_ids=(1,), label="12")
    done = [
        Completion(token_ids=ids([1] * 3), logprobs=None, finish_reason="stop", policy_version=0, text=text)
        for text, _ in answers
    ]
    return RolloutGroup(
        prompt=prompt,
        rollouts=tuple(Rollout(prompt=prompt, completion=c, reward=s) for c, (_, s) in zip(done, answers, strict=True)),
    )


@pytest.mark.parametrize("n", [2, 5, 8])
def test_pass_at_k_is_the_fraction_of_subsets_with_a_correct_response(n: int) -> None:
    for solved in range(n + 1):
        scores = [i < solved for i in range(n)]
        for k in range(1, n + 1):
            assert pass_at_k(n, solved, k) == pytest.approx(mean(any(s) for s in combinations(scores, k)))


def test_the_majority_vote_counts_answers_and_not_texts() -> None:
    box = "so \\boxed{{{}}}".format
    assert majority_score(group((box(12), 1.0), ("x", 0.0), (box(12) + "!", 1.0), ("y", 0.0)).rollouts) == 1.0
    assert majority_score(group((box(3), 0.0), ("Answer: 3", 0.0), (box(12), 1.0)).rollouts) == 0.0
    assert majority_score(group((box(12), 1.0), (box(3), 0.0)).rollouts) == 1.0, "of a tie the first"
    halves = [(box(text), 1.0) for text in ("1/2", "\\frac12", "0.5", "\\dfrac{1}{2}")]
    assert majority_score(group(*[(box(3), 0.0)] * 3, *halves).rollouts) == 1.0
    others = [(box(text), 1.0) for text in ("1/2", "50", "1,234", "(1, 2)")]
    assert majority_score(group(*others, *[(box(3), 0.0)] * 2).rollouts) == 0.0
    formulas = ("9^{9^{9^{9}}}", "(" * 5000, "\\frac" * 500, "1e999", "{" * 900 + "}" * 900)
    hostile = [(box(text), 0.0) for text in formulas]
    assert majority_score(group(*hostile, *[(box("1e3"), 1.0), (box("1000"), 1.0)]).rollouts) == 1.0
    powers = [(box(text), 1.0) for text in ("10^{1000000}", "\\frac{10^{1000000}}{1}")]
    assert majority_score(group((box(3), 0.0), *powers).rollouts) == 1.0, "Python writes no number of so many digits"
    assert majority_score(group((box(10), 0.0), (box("a"), 1.0), (box("a"), 1.0)).rollouts) == 1.0
    assert majority_score(group((" same ", 1.0), ("same", 0.5), ("other", 0.0)).rollouts) == 0.75


def test_all_ranks_report_the_same_names_even_without_prompts() -> None:
    groups = [group(*(("a", 1.0), ("b", 0.0), ("b", 0.0), ("b", 0.0), ("c", 0.0), ("d", 0.0)))]
    values, empty = eval_metrics(groups, 6), eval_metrics([], 6)
    assert list(values) == list(empty)
    found = reduce_metrics([values, empty], None)
    expected = {"accuracy": 1 / 6, "response_length": 3.0, "maj_at_6": 0.0}
    expected |= {"pass_at_1": 1 / 6, "pass_at_2": 1 / 3, "pass_at_4": 2 / 3, "pass_at_6": 1.0}
    assert found == pytest.approx(expected)
    assert set(eval_metrics(groups, 1)) == {"accuracy", "response_length"}
