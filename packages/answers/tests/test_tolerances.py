"""Both sides of every tolerance of answers and outputs: what is accepted, and its neighbor that is not."""

from __future__ import annotations

from fractions import Fraction

import pytest

from megatron_dppo_answers.code_tests import same_output, same_value
from megatron_dppo_answers.math import math_reward


def score(answer: str, label: str) -> float:
    return math_reward(prompt="", completion=f"\\boxed{{{answer}}}", label=label, metadata={"finish_reason": "stop"})


ROUNDED = [
    # Label, digits that are right, and neighbors by one unit of the last digit, or with one digit less than six.
    ("1/3", ["0.333333", "0.33333333"], ["0.333334", "0.333332", "0.33333", "0.33333334", "-0.333333"]),
    ("2/3", ["0.666667", "0.666666", "0.66666667"], ["0.666668", "0.666665", "0.66667", "-0.666667"]),
    ("-2/3", ["-0.666667", "-0.666666"], ["-0.666668", "-0.666665", "0.666667"]),
    ("\\pi", ["3.14159", "3.141593", "3.141592"], ["3.14158", "3.14160", "3.141594", "3.141591", "3.1416"]),
    ("1000/7", ["142.857", "142.8571"], ["142.858", "142.856", "142.86"]),
    ("1/700", ["0.00142857", "0.001428571"], ["0.00142858", "0.00142856", "0.0014286"]),
    ("0.3333333333", ["0.333333"], ["0.333334", "0.333332"]),
    ("0.6666666667", ["0.666667"], ["0.666666", "0.666668"]),
    ("1/8", ["0.125"], ["0.12", "0.13", "0.1249999", "0.1250001"]),
]


@pytest.mark.parametrize(("label", "right", "wrong"), ROUNDED, ids=[label for label, _, _ in ROUNDED])
def test_a_rounded_decimal_has_six_digits_and_no_other_one(label: str, right: list[str], wrong: list[str]) -> None:
    """Cut off instead of rounded counts for an exact number alone: 0.666666 for 2/3, and not for 0.6666666667."""
    assert {answer: score(answer, label) for answer in [*right, *wrong]} == {
        **dict.fromkeys(right, 1.0),
        **dict.fromkeys(wrong, 0.0),
    }


@pytest.mark.parametrize("wanted", ["2.0", "-2.0", "1000000.0", "0.001", "0.0", "1e3"])
@pytest.mark.parametrize("sign", [1, -1])
def test_floats_differ_by_the_tolerance_of_numpy_and_by_no_more(wanted: str, sign: int) -> None:
    """1e-8 and 1e-5 of the expected number, not of the actual one."""
    value = Fraction(wanted)
    allowed = Fraction(1, 10**8) + abs(value) / 10**5
    inside, outside = (value + sign * allowed * Fraction(factor) for factor in ("0.999", "1.001"))
    for number, is_same in ((inside, True), (outside, False)):
        text = f"{float(number):.17f}"
        assert same_output(text, wanted) == is_same, text
        assert same_value(float(number), float(value)) == is_same
        assert same_value([1, float(number)], [1, float(value)]) == is_same


def test_integers_have_no_tolerance_however_long_they_are() -> None:
    large = 10**30
    assert same_output(str(large), str(large)) and not same_output(str(large + 1), str(large))
    assert same_value(large, large) and not same_value(large + 1, large)
    assert not same_output("100000.0000001", "100000") and same_output("100000.0", "100000")
    assert not same_output("1000001", "1000000") and same_output("1000001", "1000000.0")
