"""Conditions of a shell script: true, false, or unknown without running it."""

import operator
import re
from collections.abc import Callable, Sequence

from tree_sitter import Node

from megatron_dppo_port.shell_expansion import Expander
from megatron_dppo_port.shell_values import UnknownValueError, Word, matches, node_text

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


def negate(value: bool | None) -> bool | None:
    """Return the negation. Unknown stays unknown."""
    return None if value is None else not value


def both(first: bool | None, second: bool | None) -> bool | None:
    """Return the conjunction. False decides, also beside an unknown value."""
    if first is False or second is False:
        return False
    return None if first is None or second is None else True


def evaluate_test(expander: Expander, node: Node) -> bool | None:
    """Return the value of ``[ ... ]`` or ``[[ ... ]]``. None if it is unknown."""
    try:
        return _expression(expander, node)
    except UnknownValueError:
        return None


def evaluate_words(words: Sequence[Word]) -> bool | None:
    """Return the value of ``test`` with these arguments. None if it is unknown."""
    if any(word.unknown for word in words):
        return None
    texts = [word.text for word in words]
    if texts[:1] == ["!"]:
        return negate(evaluate_words(words[1:]))
    if len(texts) == 1:
        return texts[0] != ""
    if len(texts) == 2:
        return _unary(texts[0], texts[1])
    # POSIX leaves the value of longer tests open.
    return _binary(texts[0], texts[1], texts[2], is_pattern=False) if len(texts) == 3 else None


def _expression(expander: Expander, node: Node) -> bool | None:
    kind = node.type
    if kind in ("test_command", "parenthesized_expression"):
        return _expression(expander, node.named_children[0]) if len(node.named_children) == 1 else None
    if kind == "unary_expression":
        sign = node_text(node.child_by_field_name("operator"))
        operand = node.named_children[-1]
        if sign == "!":
            return negate(_expression(expander, operand))
        if sign == "-v":
            # Where the script does not set it, the environment may.
            return True if node_text(operand) in expander.state.variables else None
        return _unary(sign, expander.join(operand).known)
    if kind == "binary_expression":
        return _binary_expression(expander, node)
    return expander.join(node).known != ""


def _binary_expression(expander: Expander, node: Node) -> bool | None:
    left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
    sign = node_text(node.child_by_field_name("operator"))
    if left is None or right is None:
        return None
    if sign in ("&&", "-a", "||", "-o"):
        first, second = evaluate_test(expander, left), evaluate_test(expander, right)
        if sign in ("&&", "-a"):
            return both(first, second)
        return negate(both(negate(first), negate(second)))
    # Only ``[[`` takes an unquoted right side as a pattern.
    is_pattern = right.type not in ("string", "raw_string") and node_text(node.parent).startswith("[[")
    first_word = expander.join(left).known
    is_text = right.type in ("extglob_pattern", "regex")
    return _binary(first_word, sign, node_text(right) if is_text else expander.join(right).known, is_pattern)


def _unary(sign: str, text: str) -> bool | None:
    """Return the value of a test of one word. None for a test of a file."""
    if sign in ("-z", "-n"):
        return (text == "") == (sign == "-z")
    # Files may differ on the machine that the script is for.
    return None


def _binary(left: str, sign: str, right: str, is_pattern: bool) -> bool | None:
    if sign in ("=", "=="):
        return matches(left, right) if is_pattern else left == right
    if sign == "!=":
        return negate(_binary(left, "=", right, is_pattern))
    if sign in _NUMBERS:
        if not all(re.fullmatch(r"\s*-?\d{1,18}\s*", text) for text in (left, right)):
            return None
        return _NUMBERS[sign](int(left), int(right))
    if sign in ("<", ">", r"\<", r"\>"):
        return left < right if sign.endswith("<") else left > right
    # Only expressions that Python reads as bash does.
    if sign == "=~" and re.fullmatch(r"\^?[\w .:/,-]*\$?", right):
        return re.search(right, left) is not None
    return None
