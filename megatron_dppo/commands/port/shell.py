"""Parser for the arguments of a command in a shell script. Never runs the script.

Values come from assignments at the top level of the script: ``X=1``, ``${X:-1}``, arrays, integer arithmetic. Values
that depend on a condition, a loop, another program or the command line are marked as unknown, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from megatron_dppo.errors import ConfigError


@dataclass(frozen=True)
class Word:
    """Argument of a command."""

    text: str
    unknown: str | None = None
    """Reason why a part of the text is unknown. None if all of it is known."""


_BRANCHES = ("if_statement", "for_statement", "while_statement", "case_statement", "c_style_for_statement", "list")
_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: int(a / b),
    "%": lambda a, b: a % b,
}


class _UnknownValueError(Exception):
    """A value that is known only by running the script."""


def commands(script: str, environment: dict[str, str]) -> list[list[Word]]:
    r"""Return the words of every command of a script, in order.

    Example:
        >>> [[word.text for word in words] for words in commands("N=2\nA=(--n $N)\nrun ${A[@]} --m=$((N * 3))", {})]
        [['run', '--n', '2', '--m=6']]

    Args:
        script: Text of a bash script.
        environment: Known environment variables such as HOME.

    Raises:
        ConfigError: The text is not bash.
    """
    tree = Parser(Language(tree_sitter_bash.language())).parse(script.encode())
    if tree.root_node.has_error and not tree.root_node.named_children:
        raise ConfigError("The script cannot be parsed as bash")
    reader = _Reader(environment)
    reader.walk(tree.root_node, certain=True)
    return reader.commands_read


class _Reader:
    def __init__(self, environment: dict[str, str]) -> None:
        self._values: dict[str, list[Word]] = {name: [Word(value)] for name, value in environment.items()}
        self.commands_read: list[list[Word]] = []

    def walk(self, node: Node, certain: bool) -> None:
        """Read assignments and commands in order. Those inside a branch are not certain."""
        for child in node.named_children:
            if child.type == "variable_assignment":
                self._assign(child, certain)
            elif child.type == "command":
                self.commands_read.append([word for part in child.named_children for word in self.words(part)])
            elif child.type != "function_definition":
                self.walk(child, certain and child.type not in _BRANCHES)

    def _assign(self, node: Node, certain: bool) -> None:
        name_node, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        name = _node_text(name_node)
        if not certain or (name_node is not None and name_node.type == "subscript"):
            name = name.partition("[")[0]
            self._values[name] = [Word("", f"${name} is set under a condition (line {node.start_point[0] + 1})")]
        elif value is None:
            self._values[name] = [Word("")]
        elif value.type == "array":
            items = [word for part in value.named_children for word in self.words(part)]
            self._values[name] = (
                self._values.get(name, []) if "+=" in _node_text(node).partition("(")[0] else []
            ) + items
        else:
            self._values[name] = [self._join(value)]

    def words(self, node: Node) -> list[Word]:
        """Return the words that a part of a command expands to."""
        if node.type in ("comment", "file_redirect", "heredoc_redirect", "variable_assignment"):
            return []
        if _is_all_elements(node):
            inner = node.named_children[0] if node.type == "string" else node
            name = _node_text(inner).strip("${}").partition("[")[0]
            unset = [Word(_node_text(inner), f"${name} is not set in the file")]
            elements = [] if name in ("@", "*") else self._values.get(name, unset)
            if node.type == "string":
                return elements
            return [Word(part, w.unknown) for w in elements for part in (w.text.split() if not w.unknown else [w.text])]
        if node.type in ("expansion", "simple_expansion"):
            word = self._join(node)
            return [word] if word.unknown else [Word(part) for part in word.text.split()]
        return [self._join(node)]

    def _join(self, node: Node) -> Word:
        try:
            return Word(self._value(node))
        except _UnknownValueError as reason:
            return Word(_node_text(node), str(reason))

    def _value(self, node: Node) -> str:
        kind, text = node.type, _node_text(node)
        if kind == "raw_string":
            return text[1:-1]
        if kind in ("word", "string_content"):
            return text.replace("\\\n", "").replace("\\", "") if kind == "word" else text.replace('\\"', '"')
        if kind == "string":
            return self._string(node)
        if kind in ("concatenation", "command_name"):
            return "".join(self._value(child) for child in node.children)
        if kind in ("simple_expansion", "expansion"):
            return self._expansion(node)
        if kind == "arithmetic_expansion":
            return str(self._number(node.named_children[0]))
        if kind in ("number", "variable_name"):
            return text
        if kind in ("command_substitution", "process_substitution"):
            raise _UnknownValueError(f"known only by running {text[:40]}")
        return text

    def _string(self, node: Node) -> str:
        """Return the text between the quotes, with the white space around expansions."""
        parts: list[str] = []
        start = node.start_byte
        end = start + 1
        source = node.text or b""
        for child in node.named_children:
            parts += [source[end - start : child.start_byte - start].decode(), self._value(child)]
            end = child.end_byte
        return "".join([*parts, source[end - start : -1].decode()])

    def _expansion(self, node: Node) -> str:
        operator = next((c.type for c in node.children if c.type in (":-", "-", ":=", "=")), None)
        inside = [c for c in node.named_children if c.type != "comment"]
        plain = operator is None and all(c.type in ("$", "${", "}") or c.is_named for c in node.children)
        if not inside or not (plain or operator):
            raise _UnknownValueError(f"{_node_text(node)} is an unsupported expansion")
        name = _node_text(inside[0])
        known = self._values.get(name)
        if known is not None and not (operator in (":-", ":=") and known == [Word("")]):
            if known and known[0].unknown:
                raise _UnknownValueError(known[0].unknown)
            return known[0].text if known else ""
        if operator:
            return "".join(self._value(child) for child in inside[1:])
        raise _UnknownValueError(f"${name} is not set in the file")

    def _number(self, node: Node) -> int:
        if node.type == "binary_expression":
            left, right = (self._number(part) for part in node.named_children)
            sign = next(child.type for child in node.children if not child.is_named)
            if sign in _OPERATORS and (right or sign not in "/%"):
                return _OPERATORS[sign](left, right)
        elif node.type == "parenthesized_expression":
            return self._number(node.named_children[0])
        elif node.type == "variable_name" and not (self._values.get(_node_text(node)) or [Word("", "")])[0].unknown:
            if _node_text(node) in self._values:
                return self._integer(self._values[_node_text(node)][0].text)
        elif node.type in ("number", "word", "expansion", "simple_expansion"):
            return self._integer(self._value(node))
        raise _UnknownValueError(f"$(({_node_text(node)})) is not supported")

    def _integer(self, text: str) -> int:
        if not text.strip().lstrip("-").isdigit():
            raise _UnknownValueError(f"{text!r} is not an integer")
        return int(text)


def _is_all_elements(node: Node) -> bool:
    """Return True for all elements of an array, or all arguments of the script."""
    inner = node.named_children[0] if node.type == "string" and len(node.named_children) == 1 else node
    text = _node_text(inner)
    return inner.type in ("expansion", "simple_expansion") and (text.endswith(("[@]}", "[*]}")) or text in ("$@", "$*"))


def _node_text(node: Node | None) -> str:
    return (node.text or b"").decode() if node is not None else ""


def find_launch(
    file: Path, script: str, environment: dict[str, str], starts: Callable[[Sequence[str]], int | None]
) -> tuple[str, list[Word]]:
    """Return program and arguments of the training command.

    Args:
        file: Path of the script, for errors.
        script: Text of the script.
        environment: Known environment variables.
        starts: Function that returns the index of a training command's first argument, or None.

    Raises:
        ConfigError: No training command, or several, which may be different runs.
    """
    launches = []
    for words in commands(script, environment):
        first = starts([word.text for word in words])
        if first is not None:
            launches.append((words[first - 1].text, words[first:]))
    if len(launches) != 1:
        raise ConfigError(
            f"{file}: expected one command that starts verl (python -m verl.trainer.main_ppo) or slime (python "
            f"train.py), got {len(launches)}. Fix: put one command with its variables into a separate file"
        )
    return launches[0]
