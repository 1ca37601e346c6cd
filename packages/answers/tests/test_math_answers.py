"""Answers by value: a table of forms and labels, cases decided by hand, and how boxes and answer lines are found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from math_forms import pairs
from megatron_dppo_answers.equality import answer_key
from megatron_dppo_answers.math import extract_answer, is_well_formed, math_reward, quick_score

HAND_MADE = Path(__file__).parent / "math_answers.txt"
"""Lines ``answer @@ label @@ score``, decided by a person."""


def score(completion: str, label: str) -> float:
    return math_reward(prompt="", completion=completion, label=label, metadata={"finish_reason": "stop"})


@pytest.mark.slow
def test_a_right_answer_in_any_form_scores_one_and_a_wrong_one_never() -> None:
    """At least 5,000 pairs of labels like those of MATH-500 with forms in both directions."""
    table = pairs()
    assert len(table) >= 5000 and sum(expected == 0 for _, _, expected in table) >= 1500
    wrong = [(row, actual) for row in table if (actual := score(row[0], row[1])) != row[2]]
    assert not wrong, (len(wrong), wrong[:20])


def test_answers_decided_by_hand() -> None:
    rows = [line.split(" @@ ") for line in HAND_MADE.read_text(encoding="utf-8").splitlines()]
    assert len(rows) > 600
    wrong = [row for row in rows if score(f"\\boxed{{{row[0]}}}", row[1]) != float(row[2])]
    assert not wrong


BOXES: list[tuple[str, str | None]] = [
    (r"\boxed {12}", "12"),
    (r"$\boxed 12$", "12"),
    (r"so $\boxed\frac{1}{2}$ it is", r"\frac{1}{2}"),
    (r"\fbox{12}", "12"),
    (r"\boxed{12}. Put your answer in \boxed{}.", "12"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"$\boxed{1}$, $\boxed{2}$", "1, 2"),
    (r"\boxed{1} and \boxed{2}", "1, 2"),
    (r"\boxed{11} or rather \boxed{12}", "12"),
    (r"\boxed{11} \boxed{12}", "12"),
    (r"\boxed{}", None),
    (r"\boxed{} Answer: 12", None),
    ("\\boxed{}\nAnswer: 12", "12"),
    ("**Final Answer**: 12", "12"),
    ("**Answer**: 12", "12"),
    ("## Final answer: $12$.", "12"),
    ("The answer is: 12", "12"),
    ("the answer is 12", None),
    (r"\boxedness{12}", None),
]


@pytest.mark.parametrize(("text", "answer"), BOXES)
def test_boxes_and_answer_lines_in_their_spellings(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


def test_two_results_in_one_box_do_not_score_for_one_of_them() -> None:
    for completion in (
        r"\boxed{11}, \boxed{12}",
        r"\boxed{12}, \boxed{11}",
        r"\boxed{11=12}",
        r"\boxed{12 \text{ or } 11}",
    ):
        assert score(completion, "12") == 0.0
    assert score(r"\boxed{1} and \boxed{2}", "2,1") == 1.0


def test_a_format_with_an_empty_second_box_is_not_well_formed() -> None:
    assert is_well_formed(r"\boxed {12}") and is_well_formed("**Final Answer**: 12")
    assert not is_well_formed(r"\boxed{12} \boxed{}")


def test_text_and_integers_need_no_parser() -> None:
    assert quick_score("42.", "42") == 1.0
    assert quick_score("9" * 6000 + ".", "9" * 6000) == 1.0
    assert quick_score("9" * 6000, "9" * 5999 + "8") == 0.0
    assert quick_score(r"\frac{1}{2}", "0.5") is None


def test_hostile_answers_end_soon_and_score_nothing() -> None:
    hostile = [
        "9^{9^{9^{9}}}",
        "(" * 5000,
        "{" * 5000,
        "\\frac" * 3000,
        "1," * 20_000,
        "x^" * 1000 + "2",
        "10^{10^{10}}",
    ]
    hostile += ["100000!", "\\binom{99999999}{5000000}", "\\text{" * 3000, "!" * 9000, "1" * 15_000 + "." + "2" * 4000]
    hostile += ["\\sqrt{" * 2000 + "2" + "}" * 2000, "\\begin{pmatrix}" * 300, "$" * 9999, "\\left(" * 2000, "|" * 3001]
    assert [score(f"\\boxed{{{text}}}", "12") for text in hostile] == [0.0] * len(hostile)


LONG = [
    "\\boxed ",
    "answer ",
    "answer:",
    "**",
    "\\boxed{1},",
    " and ",
    "\\boxed\\x",
    "# answer:\n",
    "- ",
    "_*",
    "\n",
    " ",
    "<think>",
]
STARTS = ["", "answer", "answer is", "answer: x", "\\boxed{1}", "\\boxed"]


@pytest.mark.parametrize("read", [extract_answer, is_well_formed])
def test_long_responses_are_searched_in_linear_time(read: Callable[[str], object]) -> None:
    """A response may repeat anything a hundred thousand times; what takes quadratic time does not end here."""
    for part in LONG:
        for start in STARTS:
            read(start + part * (60_000 // len(part)) + "x")


@pytest.mark.parametrize(
    "part",
    [".", ",", " ", " .", "1 234", ",234", "\\text{", "=", "{", "{a\\choose ", "\\begin{cases}", "\\text{$", "^{", "'"],
)
def test_long_answers_are_normalized_in_the_trainer_without_an_error(part: str) -> None:
    """``quick_score`` runs in the process of the trainer: no response may raise there, or keep it busy."""
    for length in (300, 3000, 60_000):
        for end in ("", "}", "x}" * 50):
            assert quick_score("1" + part * (length // len(part)) + end, "7") in (None, 0.0)


# Spellings of one answer to a problem; two rows are two answers.
VOTES = [
    ("18", "$18", r"\$18", "18 dollars", "18.0", r"18\text{ dollars}", "x = 18", r"\frac{36}{2}"),
    ("75", r"75\%", "75 percent", "n=75"),
    ("0.75", "3/4", r"\frac34", ".75", "y = 3/4"),
    ("90", r"90^\circ", r"90^{\circ}", r"\theta = 90^\circ"),
    ("1234", "1,234", "1{,}234"),
    ("A", "(A)", r"\text{A}", r"\text{(A)}", r"\textbf{(A)}\ 12"),
    ("a", "(a)"),
    ("B", "(B)", r"\textbf{(B) } 18"),
    ("Yes", "yes", r"\text{Yes}", "Yes."),
    ("No", r"\text{no}", "NO"),
    ("no solution", r"\text{No solution}"),
    ("x+1", "x + 1"),
    ("X+1",),
    ("(1,2)", "(1, 2)"),
    ("(2,1)",),
    ("2x=4", "2x = 4"),
    ("x<5",),
    (r"\frac{x}{2}",),
]


def test_votes_for_one_answer_have_one_key_and_two_answers_have_two() -> None:
    keys = [{answer_key(text) for text in row} for row in VOTES]
    assert [row for row, found in zip(VOTES, keys, strict=True) if len(found) > 1] == []
    assert len(set.union(*keys)) == len(VOTES)


@pytest.mark.parametrize("text", ["", "{" * 900, "(" * 5000, r"\frac" * 500, "9^{9^{9^{9}}}", "$", "=", "x=", "()"])
def test_a_vote_of_any_text_has_a_key(text: str) -> None:
    assert answer_key(text) == answer_key(text)
