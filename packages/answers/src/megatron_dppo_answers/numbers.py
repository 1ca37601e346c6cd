r"""Equality of numbers with units and of formulas: exact for numbers, by evaluation at points for formulas.

A rounded decimal equals a number only if it has at least six significant digits and the number rounds to it.
"""

import random
from collections.abc import Sequence
from fractions import Fraction

import sympy
from sympy import Expr, Rational, Symbol

from megatron_dppo_answers.values import Quantity

_ROUNDED_DIGITS = 6
_NUM_POINTS = 8
_MIN_POINTS = 4
_DIGITS = 40


def same_quantity(answer: Quantity, label: Quantity) -> bool:
    """Return True if two quantities are equal; a unit may be missing on one side, but not be another one."""
    if answer.unit and label.unit:
        if answer.unit.dimensions != label.unit.dimensions:
            return _same_plain_value(answer, label)
        if answer.unit.factor == label.unit.factor:
            return _same_number(answer, label)
        return same_expression(answer.expression * answer.unit.factor, label.expression * label.unit.factor)
    if _same_number(answer, label):
        # A share of .5 is not .5 percent, but 50 as the label of a share is 50 percent.
        is_percent = answer.unit is not None and answer.unit.is_percent
        return not is_percent or not label.expression.is_number or bool(abs(label.expression) > 1)
    return _same_plain_value(answer, label)


def _same_plain_value(answer: Quantity, label: Quantity) -> bool:
    """Return True if one side has a unit that is a plain number (percent, degrees), and the values are equal."""
    scaled = []
    for each in (answer, label):
        if each.unit is None:
            scaled.append(each.expression)
        elif each.unit.is_percent or each.unit.is_angle:
            scaled.append(each.expression * (Rational(1, 100) if each.unit.is_percent else each.unit.factor))
        else:
            return False
    return same_expression(scaled[0], scaled[1])


def _same_number(answer: Quantity, label: Quantity) -> bool:
    if same_expression(answer.expression, label.expression):
        return True
    return _rounds_to(answer, label) or _rounds_to(label, answer)


def _rounds_to(number: Quantity, decimal: Quantity) -> bool:
    """Return True if a number, rounded to the digits of a long decimal or cut off there, is that decimal."""
    digits = decimal.digits
    if digits is None or digits < _ROUNDED_DIGITS or (number.digits is not None and number.digits <= digits):
        return False
    value = number.expression
    if not value.is_number or value.is_infinite or not value.is_real or not value.is_nonzero:
        return False
    written = Fraction(int(decimal.expression.p), int(decimal.expression.q))
    # The power of ten of the first significant digit.
    exponent = len(str(abs(written.numerator))) - len(str(written.denominator))
    exponent -= abs(written) < Fraction(10) ** exponent
    places = digits - 1 - exponent
    approximate = value.evalf(digits + 15)
    exact = Fraction(int(Rational(approximate).p), int(Rational(approximate).q))
    unit = 1 / Fraction(10) ** places
    # Cut off instead of rounded is right only for an exact number: 0.666666 for 2/3.
    is_truncated = number.digits is None and 0 <= abs(exact) - abs(written) < unit and exact * written > 0
    return abs(exact - written) <= unit / 2 or is_truncated


def same_expression(first: Expr, second: Expr) -> bool:
    """Return True if two expressions are equal wherever they are defined."""
    if first == second:
        return True
    if first.is_Rational and second.is_Rational:
        return False
    symbols = sorted(first.free_symbols | second.free_symbols, key=str)
    if not symbols:
        return _same_constant(first, second)
    # At random points: two formulas that agree at all of them are equal (Schwartz and Zippel).
    compared = 0
    for point in _points(symbols):
        values = evaluate(first, point), evaluate(second, point)
        if values[0] is None or values[1] is None:
            continue
        size = max(abs(values[0]), abs(values[1]))
        # A relative error says nothing about zero, so sympy decides.
        if size < Rational(1, 10**30) and (first == 0 or second == 0):
            return bool(sympy.simplify(first - second) == 0)
        if abs(values[0] - values[1]) > size * Rational(1, 10**25):
            return False
        compared += 1
    return compared >= _MIN_POINTS


def _same_constant(first: Expr, second: Expr) -> bool:
    if first.is_infinite or second.is_infinite:
        return False
    scale = max(abs(complex(evaluate(first, {}, 15) or 0)), abs(complex(evaluate(second, {}, 15) or 0)))
    if scale == 0:
        return False
    # sympy raises the precision until 15 digits of the difference are known; only a true zero stays tiny.
    difference = (first - second).evalf(15, maxn=2000)
    if not difference.is_number:
        return False
    return bool(abs(difference) < min(1.0, scale) * Rational(1, 10**60))


def _points(symbols: Sequence[Symbol]) -> list[dict[Symbol, Expr]]:
    # A fixed seed, so that an answer has the same score in every run.
    generator = random.Random(20260101)
    points = []
    for index in range(_NUM_POINTS):
        # Both signs, so that |x| and x differ; between 1/4 and 3, so that powers stay in range.
        signs = [generator.choice((-1, 1)) if index % 4 else 1 for _ in symbols]
        points.append(
            {
                symbol: sign * Rational(generator.randint(257, 3001), 1009)
                for symbol, sign in zip(symbols, signs, strict=True)
            }
        )
    return points


def evaluate(expression: Expr, point: dict[Symbol, Expr], digits: int = _DIGITS) -> Expr | None:
    """Return the finite value at a point, or None."""
    value = expression.evalf(digits, subs=point) if point else expression.evalf(digits)
    is_finite = value.is_number and not value.has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan) and not value.free_symbols
    return value if is_finite else None


def constant_ratio(first: Expr, second: Expr) -> Expr | None:
    """Return the real factor between two expressions if it is the same everywhere, else None."""
    symbols = sorted(first.free_symbols | second.free_symbols, key=str)
    ratio: Expr | None = None
    compared = 0
    for point in _points(symbols):
        values = evaluate(first, point), evaluate(second, point)
        if values[0] is None or values[1] is None or values[0] == 0 or values[1] == 0:
            continue
        here = values[0] / values[1]
        if ratio is not None and abs(here - ratio) > abs(ratio) * Rational(1, 10**20):
            return None
        ratio = here
        compared += 1
    if compared < _MIN_POINTS or ratio is None or abs(sympy.im(ratio)) > abs(ratio) * Rational(1, 10**20):
        return None
    return sympy.re(ratio)
