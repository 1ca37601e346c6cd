"""Integer arithmetic of a shell script, with variables that may be unknown."""

import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable

from tree_sitter import Node

from megatron_dppo_port.shell_values import State, UnknownValueError, Word, node_text

_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_BITS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
}
_OPERANDS = (
    *("number", "word", "variable_name", "expansion", "simple_expansion", "string", "subscript"),
    "command_substitution",
)


class Arithmetic(ABC):
    """Evaluator of ``$(( ))`` and ``(( ))``."""

    state: State

    @abstractmethod
    def operand(self, node: Node) -> Word:
        """Return the value of an operand, where names need no ``$``."""

    def integer(self, node: Node) -> int:
        """Return the value of an arithmetic expression. Raises ``UnknownValueError`` if it is unknown."""
        # bash counts in 64 bits.
        return (self._integer(node) + 2**63) % 2**64 - 2**63

    def _integer(self, node: Node) -> int:
        kind = node.type
        if kind in ("parenthesized_expression", "arithmetic_expansion"):
            return self.integer(node.named_children[-1])
        if kind == "variable_assignment":
            return self._assign(node)
        if kind == "binary_expression":
            return self._binary(node)
        if kind in ("unary_expression", "postfix_expression"):
            return self._unary(node)
        if kind == "ternary_expression":
            condition, yes, no = node.named_children
            return self.integer(yes if self.integer(condition) else no)
        if kind in _OPERANDS:
            return parse_integer(self.operand(node))
        raise UnknownValueError(f"$(({node_text(node)})) is not supported")

    def _assign(self, node: Node) -> int:
        value = node.child_by_field_name("value")
        if value is None:
            raise UnknownValueError(f"$(({node_text(node)})) is not supported")
        number = self.integer(value)
        self.state.set(node_text(node.child_by_field_name("name")), Word(str(number)))
        return number

    def _binary(self, node: Node) -> int:
        left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
        sign = node_text(node.child_by_field_name("operator"))
        if left is None or right is None:
            raise UnknownValueError(f"$(({node_text(node)})) is not supported")
        if sign in ("=", "+=", "-=", "*="):
            value = self.integer(right)
            if sign != "=":
                value = _BITS[sign[0]](self.integer(left), value)
            self.state.set(node_text(left), Word(str(value)))
            return value
        first = self.integer(left)
        # The right side may assign, so it is read only where bash would.
        if sign in ("&&", "||"):
            return int(bool(first) if bool(first) == (sign == "||") else bool(self.integer(right)))
        second = self.integer(right)
        if sign in _COMPARISONS:
            return int(_COMPARISONS[sign](first, second))
        if sign in _BITS:
            return _BITS[sign](first, second)
        if sign in ("/", "%") and second:
            # bash rounds towards 0, Python down.
            quotient = abs(first) // abs(second) * (1 if (first < 0) == (second < 0) else -1)
            return quotient if sign == "/" else first - quotient * second
        if sign == "**" and 0 <= second < 64:
            return int(first**second)
        raise UnknownValueError(f"$(({node_text(node)})) is not supported")

    def _unary(self, node: Node) -> int:
        operand = node.named_children[-1] if node.named_children else node
        sign = node_text(node).replace(node_text(operand), "").strip()
        value = self.integer(operand)
        if sign in ("++", "--"):
            changed = value + (1 if sign == "++" else -1)
            self.state.set(node_text(operand), Word(str(changed)))
            return value if node.type == "postfix_expression" else changed
        if sign in ("-", "+", "!"):
            return -value if sign == "-" else value if sign == "+" else int(not value)
        raise UnknownValueError(f"$(({node_text(node)})) is not supported")


def parse_integer(word: Word) -> int:
    """Return the integer of a word, as bash reads it. Raises ``UnknownValueError`` for another word."""
    text = word.known.strip()
    # A leading 0 means octal.
    if re.fullmatch(r"[+-]?0[0-7]+", text):
        return int(text, 8)
    if re.fullmatch(r"[+-]?(0|[1-9]\d*)", text) and len(text) < 20:
        return int(text)
    raise UnknownValueError(f"{word.text!r} is not an integer")
