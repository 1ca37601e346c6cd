"""Exact arithmetic of answers. ``CannotRead`` stands for results that are undefined or too large to compute."""

from fractions import Fraction

import sympy
from sympy import Expr, Rational

_MAX_BITS = 1 << 22
"""Largest size of a power that is computed exactly."""
_MAX_FACTORIAL = 50_000


class CannotRead(ValueError):
    """Text that is not an expression of this grammar."""


def read_number(digits: str) -> Rational:
    """Return a decimal literal exactly, of any length."""
    integer_part, _, fraction = digits.replace(",", "").partition(".")
    # Fraction and Integer reject more than 4,300 digits of text, so join blocks of 4,000.
    value = 0
    joined = integer_part + fraction
    for start in range(0, len(joined), 4000):
        block = joined[start : start + 4000]
        value = value * 10 ** len(block) + int(block)
    return Rational(value, 10 ** len(fraction))


def divide(value: Expr, divisor: Expr) -> Expr:
    """Return the quotient."""
    if divisor == 0:
        raise CannotRead("division by zero")
    return value / divisor


def raise_to(base: Expr, exponent: Expr) -> Expr:
    """Return the power."""
    if base.is_Rational and exponent.is_Rational:
        bits = max(abs(int(base.p)).bit_length(), int(base.q).bit_length())
        if abs(exponent) * bits > _MAX_BITS:
            raise CannotRead("a number that is too large to compute")
    value = base**exponent
    if value.has(sympy.zoo, sympy.nan):
        raise CannotRead("an undefined power")
    return value


def factorial(value: Expr) -> Expr:
    """Return the factorial."""
    if value.is_Rational and (not value.is_Integer or value < 0 or value > _MAX_FACTORIAL):
        raise CannotRead("a factorial that is undefined or too large to compute")
    return sympy.factorial(value)


def binomial(upper: Expr, lower: Expr) -> Expr:
    """Return the binomial coefficient."""
    if upper.is_number and (not upper.is_Integer or abs(upper) > _MAX_FACTORIAL or not lower.is_number):
        raise CannotRead("a binomial coefficient that is too large to compute")
    return sympy.binomial(upper, lower)


def repeating(integer_part: str, fixed: str, period: str) -> Expr:
    """Return the value of a decimal whose last digits repeat."""
    shift = 10 ** len(fixed)
    value = Fraction(int(integer_part + fixed or "0"), shift)
    value += Fraction(int(period), shift * (10 ** len(period) - 1))
    return Rational(value.numerator, value.denominator)
