r"""Equality of two answers of any kind by value; nothing is equal because it looks alike or contains the other."""

import re
from collections.abc import Sequence
from itertools import pairwise

import sympy
from sympy import Expr, Symbol

from megatron_dppo_answers.normalize import comparison_text, normalize_answer
from megatron_dppo_answers.numbers import constant_ratio, evaluate, same_expression, same_quantity
from megatron_dppo_answers.values import (
    Chain,
    Choice,
    Grid,
    Group,
    NamedSet,
    Numeral,
    Quantity,
    Ratio,
    Union,
    Value,
    Words,
    is_name,
    plain_words,
    read_values,
)

_INEQUALITIES = {"<": sympy.Lt, ">": sympy.Gt, "\\le": sympy.Le, "\\ge": sympy.Ge, "\\ne": sympy.Ne}
_BARE_WORDS = re.compile(r"\(?[A-Za-z][A-Za-z ]*\)?")
"""One letter, or words that are read as a product of letters: Yes, (A)."""
_FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\ne": "\\ne", "=": "="}


def same_answer(answer: str, label: str) -> bool:
    """Return True if two normalized answers mean the same."""
    if comparison_text(answer) == comparison_text(label):
        return bool(answer)
    wanted = read_values(label)
    try:
        # A text can have two readings (``read_values``), so one equal pair suffices.
        return any(_same(each, other) for each in read_values(answer) for other in wanted)
    except Exception:  # what sympy raises on unusual formulas is open; such an answer is no failure of the function
        return False


def answer_key(answer: str) -> str:
    r"""Return a text that answers to one problem share if they give the same number, choice or words.

    It takes no algebra, so many answers can be counted: ``\frac12`` is ``1/2`` and ``x = .5``, but x + x is not 2x.
    Units are left out, as ``same_answer`` lets one be missing: ``90^\circ`` is 90.
    """
    normalized = normalize_answer(answer)
    value = next(iter(read_values(normalized)), None)
    if isinstance(value, Chain) and value.signs == ("=",) and is_name(value.sides[0].text):
        value = value.sides[1]
    if isinstance(value, Choice):
        return value.letter
    if isinstance(value, NamedSet):
        return value.name
    if isinstance(value, Quantity) and value.expression.is_Rational:
        number = value.expression
        # Decimal digits have a limit in Python, and a number may have a million of them.
        return f"{int(number.p):#x}/{int(number.q):#x}"
    if isinstance(value, Words) or _BARE_WORDS.fullmatch(normalized):
        return plain_words(normalized)
    return comparison_text(normalized)


def _same(answer: Value, label: Value) -> bool:
    # The order matters: choices and relations hold values of all other kinds, so they are unwrapped first.
    if isinstance(answer, Choice) or isinstance(label, Choice):
        return _same_choice(answer, label)
    if isinstance(answer, Chain) or isinstance(label, Chain):
        return _same_with_relations(answer, label)
    if isinstance(answer, Words) or isinstance(label, Words):
        return plain_words(answer.text) == plain_words(label.text)
    if isinstance(answer, Quantity) and isinstance(label, Quantity):
        return same_quantity(answer, label)
    if isinstance(answer, Numeral) and isinstance(label, Numeral):
        return (answer.digits, answer.base) == (label.digits, label.base)
    if isinstance(answer, Ratio) and isinstance(label, Ratio):
        return _same_ratio(answer, label)
    if isinstance(answer, Grid) or isinstance(label, Grid):
        return _same_grid(answer, label)
    if isinstance(answer, Union | NamedSet) or isinstance(label, Union | NamedSet):
        return _same_sets(answer, label)
    if isinstance(answer, Group) and isinstance(label, Group):
        return _same_group(answer, label)
    # A group of one element, such as \{3\}, is that element.
    for group, other in ((answer, label), (label, answer)):
        if isinstance(group, Group) and len(group.items) == 1 and not isinstance(other, Group):
            return group.opening in ("", "\\{") and _same(group.items[0], other)
    return False


def _same_choice(answer: Value, label: Value) -> bool:
    if isinstance(answer, Choice) and isinstance(label, Choice):
        return answer.letter == label.letter and _same(answer.content, label.content)
    choice, other = (answer, label) if isinstance(answer, Choice) else (label, answer)
    assert isinstance(choice, Choice)
    if plain_words(other.text) == choice.letter:
        return True
    return _same(choice.content, other) if choice is answer else _same(other, choice.content)


# --- groups


def _same_group(answer: Group, label: Group) -> bool:
    if answer.is_ordered and label.is_ordered:
        return _same_brackets(answer, label) and _same_items(answer.items, label.items)
    if answer.is_ordered or label.is_ordered:
        bare = label if answer.is_ordered else answer
        ordered = answer if answer.is_ordered else label
        # A set is no tuple, and a list of two no interval.
        if bare.opening or (
            len(bare.items) == 2 and ordered.opening + ordered.closing not in ("()", "\\langle\\rangle")
        ):
            return False
        ours, theirs = (each.items if each.is_ordered else _in_order(each) for each in (answer, label))
        return _same_items(ours, theirs)
    # In a set repetitions do not count, so each side must cover the other.
    if "\\{" in (answer.opening, label.opening):
        return _covers(answer.items, label.items) and _covers(label.items, answer.items)
    # A bare list has no order, but its repetitions count.
    return len(answer.items) == len(label.items) and _matches(list(answer.items), list(label.items))


def _in_order(group: Group) -> tuple[Value, ...]:
    """Return the items of a list; those of ``y=2, x=1`` by their names."""
    names = [each.sides[0].text for each in group.items if isinstance(each, Chain) and is_name(each.sides[0].text)]
    if len(names) == len(group.items) == len(set(names)):
        return tuple(item for _, item in sorted(zip(names, group.items, strict=True), key=lambda pair: pair[0]))
    return group.items


def _same_brackets(answer: Group, label: Group) -> bool:
    """Return True unless the brackets differ and may mean intervals with other ends."""
    pair = (answer.opening + answer.closing, label.opening + label.closing)
    return pair[0] == pair[1] or len(answer.items) > 2 or "\\langle\\rangle" in pair


def _same_items(first: Sequence[Value], second: Sequence[Value]) -> bool:
    return len(first) == len(second) and all(_same(*pair) for pair in zip(first, second, strict=True))


def _covers(first: Sequence[Value], second: Sequence[Value]) -> bool:
    return all(any(_same(each, other) for other in second) for each in first)


def _matches(first: list[Value], second: list[Value]) -> bool:
    """Return True if the lists are equal in some order."""
    for each in first:
        index = next((index for index, other in enumerate(second) if _same(each, other)), None)
        if index is None:
            return False
        del second[index]
    return True


def _same_ratio(answer: Ratio, label: Ratio) -> bool:
    if len(answer.items) != len(label.items):
        return False
    if any(re.search(r":\s*\d\d$", each.text) for each in (answer, label)):  # a time of day
        return _same_items(answer.items, label.items)
    ours, theirs = ([item.expression for item in each.items if isinstance(item, Quantity)] for each in (answer, label))
    if len(ours) != len(answer.items) or len(theirs) != len(label.items):
        return False
    # Neighbors in proportion: 2:4:6 is 1:2:3.
    return all(same_expression(a * d, b * c) for (a, b), (c, d) in zip(pairwise(ours), pairwise(theirs), strict=True))


def _same_grid(answer: Value, label: Value) -> bool:
    rows = _rows(answer), _rows(label)
    if rows[0] is None or rows[1] is None:
        return False
    # A vector may be a tuple, a row or a column, but a row is no column.
    if not (isinstance(answer, Grid) and isinstance(label, Grid)):
        flat = [[cell for row in each for cell in row] for each in rows if each is not None]
        is_vector = [1 in (len(each), len(each[0])) for each in rows if each]
        if all(is_vector):
            return _same_items(flat[0], flat[1])
    return len(rows[0]) == len(rows[1]) and all(map(_same_items, rows[0], rows[1]))


def _rows(value: Value) -> list[Sequence[Value]] | None:
    if isinstance(value, Grid):
        return list(value.rows)
    if isinstance(value, Group) and value.is_ordered:
        if all(isinstance(item, Group) for item in value.items):
            return [item.items for item in value.items if isinstance(item, Group)]
        return [value.items]
    return [[value]] if isinstance(value, Quantity) else None


# --- relations and sets


def _same_with_relations(answer: Value, label: Value) -> bool:
    if isinstance(answer, Chain) and isinstance(label, Chain):
        return _same_relations(answer, label)
    chain, other = (answer, label) if isinstance(answer, Chain) else (label, answer)
    assert isinstance(chain, Chain)
    signs = set(chain.signs)
    if signs <= {"=", "\\approx"}:
        results = _results(chain)
        if results is None:
            return False
        pairs = [(each, label) if chain is answer else (answer, each) for each in results]
        return all(_same(*pair) for pair in pairs)
    if signs == {"\\in"} and len(chain.sides) == 2 and is_name(chain.sides[0].text):
        inner = chain.sides[1]
        if isinstance(inner, Quantity):  # no set
            return False
        return _same(inner, other) if chain is answer else _same(other, inner)
    return _same_sets(answer, label)


def _results(chain: Chain) -> Sequence[Value] | None:
    """Return the sides that each have to be the result, without a name before them and roundings after them."""
    sides = list(chain.sides)
    signs = list(chain.signs)
    if is_name(sides[0].text):
        sides = sides[1:]
        signs = signs[1:]
    if not sides or (len(sides) == len(chain.sides) and "=" not in signs and "\\approx" not in signs):
        return None
    for index, sign in enumerate(signs):
        if sign == "\\approx" and not _is_near(sides[index], sides[index + 1]):
            return None
    # The first side is the result itself, like one behind "=".
    exact = [side for side, sign in zip(sides, ["=", *signs], strict=True) if sign == "="]
    return exact or None


def _is_near(first: Value, second: Value) -> bool:
    if not isinstance(first, Quantity) or not isinstance(second, Quantity):
        return False
    values = evaluate(first.expression, {}), evaluate(second.expression, {})
    if values[0] is None or values[1] is None:
        return False
    # Answers round roughly: up to one percent.
    return bool(abs(values[0] - values[1]) <= abs(values[0]) / 100)


def _same_relations(answer: Chain, label: Chain) -> bool:
    if set(answer.signs) | set(label.signs) == {"\\in"}:
        return _same(answer.sides[-1], label.sides[-1]) and answer.sides[0].text == label.sides[0].text
    if set(answer.signs) <= {"=", "\\approx"} and set(label.signs) <= {"=", "\\approx"}:
        return _same_equations(answer, label)
    if "\\in" in (*answer.signs, *label.signs) or len(answer.signs) != 1 or len(label.signs) != 1:
        return _same_sets(answer, label)
    # One inequality each, in any number of variables: the same half-space, or the same set.
    ours, theirs = _difference(answer), _difference(label)
    if ours is None or theirs is None:
        return False
    ratio = constant_ratio(ours, theirs)
    if ratio is not None:
        # A negative factor turns the sign: 2x < 4 is -x > -2.
        sign = answer.signs[0] if ratio > 0 else _FLIPPED.get(answer.signs[0])
        return sign == label.signs[0]
    return _same_sets(answer, label)


def _same_equations(answer: Chain, label: Chain) -> bool:
    ours, theirs = answer, label
    if is_name(ours.sides[0].text) and is_name(theirs.sides[0].text):
        same_names = comparison_text(ours.sides[0].text) == comparison_text(theirs.sides[0].text)
        results = _results(ours), _results(theirs)
        if same_names and results[0] and results[1]:
            return all(_same(each, other) for each in results[0] for other in results[1])
    differences = _difference(answer), _difference(label)
    if differences[0] is None or differences[1] is None:
        return False
    if constant_ratio(differences[0], differences[1]) is not None:
        return True
    return _same_solutions(differences[0], differences[1])


def _difference(chain: Chain) -> Expr | None:
    """Return left minus right of a relation of two expressions that has a variable."""
    if len(chain.sides) != 2 or not all(isinstance(side, Quantity) and side.unit is None for side in chain.sides):
        return None
    left, right = (side.expression for side in chain.sides if isinstance(side, Quantity))
    difference = left - right
    return difference if difference.free_symbols else None


def _same_solutions(first: Expr, second: Expr) -> bool:
    """Return True if two equations have equal solutions for each of their variables."""
    symbols = sorted(first.free_symbols, key=str)
    # The second condition bounds the time of ``sympy.solve``.
    if first.free_symbols != second.free_symbols or first.count_ops() + second.count_ops() > 60:
        return False
    for symbol in symbols:
        try:
            solutions = [sympy.solve(each, symbol) for each in (first, second)]
        except NotImplementedError:
            return False
        ours, theirs = ([Quantity("", each) for each in results] for results in solutions)
        if not ours or not (_covers(ours, theirs) and _covers(theirs, ours)):
            return False
    return True


def _same_sets(answer: Value, label: Value) -> bool:
    ours, theirs = _real_set(answer), _real_set(label)
    if ours is None or theirs is None:
        return False
    return ours == theirs or bool(ours.symmetric_difference(theirs).is_empty)


def _real_set(value: Value) -> sympy.Set | None:
    """Return the set of real numbers that a value stands for, or None."""
    if isinstance(value, NamedSet):
        sets = {"empty": sympy.S.EmptySet, "reals": sympy.S.Reals, "integers": sympy.S.Integers}
        return sets.get(value.name, sympy.S.Naturals)
    if isinstance(value, Group):
        return _set_from_group(value)
    if isinstance(value, Chain):
        return _solution_set(value)
    if isinstance(value, Union):
        parts = [_real_set(part) for part in value.parts]
        if any(part is None for part in parts):
            return None
        result: sympy.Set = parts[0]
        for sign, part in zip(value.signs, parts[1:], strict=True):
            if sign == "\\cup":
                result = result.union(part)
            else:
                result = result.intersect(part) if sign == "\\cap" else result - part
        return result
    return None


def _set_from_group(group: Group) -> sympy.Set | None:
    expressions = [item.expression for item in group.items if isinstance(item, Quantity)]
    if len(expressions) != len(group.items) or any(each.free_symbols for each in expressions):
        return None
    if group.opening == "\\{":
        return sympy.FiniteSet(*expressions)
    if len(expressions) == 2 and group.opening in ("(", "[") and group.closing in (")", "]"):
        if not all(each.is_extended_real for each in expressions):
            return None
        return sympy.Interval(*expressions, group.opening == "(", group.closing == ")")
    return None


def _solution_set(chain: Chain) -> sympy.Set | None:
    """Return the real solutions of a chain of inequalities in one variable."""
    if chain.signs == ("\\in",):
        return _real_set(chain.sides[1])
    if not all(isinstance(side, Quantity) and side.unit is None for side in chain.sides):
        return None
    expressions = [side.expression for side in chain.sides if isinstance(side, Quantity)]
    symbols = set().union(*(each.free_symbols for each in expressions))
    if len(symbols) != 1 or not set(chain.signs) <= set(_INEQUALITIES):
        return None
    # sympy solves inequalities in a variable that it knows to be real.
    variable = Symbol("t", real=True)
    expressions = [each.subs(next(iter(symbols)), variable) for each in expressions]
    result = sympy.S.Reals
    for sign, (left, right) in zip(chain.signs, pairwise(expressions), strict=True):
        relation = _INEQUALITIES[sign](left, right)
        # The variable has canceled out.
        if relation in (True, False):
            return None
        try:
            solutions = (
                sympy.S.Reals - sympy.solveset(left - right, variable, sympy.S.Reals)
                if sign == "\\ne"
                else sympy.solve_univariate_inequality(relation, variable, relational=False)
            )
        except (NotImplementedError, TypeError, ValueError):
            return None
        result = result.intersect(solutions)
    return result
