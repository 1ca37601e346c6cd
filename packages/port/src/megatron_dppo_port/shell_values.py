"""Words and variables of a shell script whose values may be unknown, and the nodes of its syntax tree."""

from __future__ import annotations

import fnmatch
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from megatron_dppo_port.budget import check_size, spend

_MAX_ALTERNATIVES = 16
"""Most values of a word that are told apart."""
_WORD_STEPS = 50
_SEVERAL = "(several_values)"
"""Text of an unknown part with more values."""


class UnknownValueError(Exception):
    """A value that is known only by running the script."""


class UnsetVariableError(UnknownValueError):
    """A variable that is not set."""


def parse(text: str) -> Node:
    """Return the syntax tree of a bash script."""
    spend(10 * len(text))
    # The grammar does not see $1 behind a part of a word (tree-sitter-bash 0.25.1), but sees ${1} there.
    text = re.sub(r"(?<=[\w}.,:/+-])\$(\d)", r"${\1}", text)
    return Parser(Language(tree_sitter_bash.language())).parse(text.encode()).root_node


def node_text(node: Node | None) -> str:
    """Return the source text of a node. Empty for None."""
    return (node.text or b"").decode() if node is not None else ""


def line(node: Node) -> int:
    """Return the line of a node, from 1."""
    return node.start_point[0] + 1


@dataclass(frozen=True)
class Word:
    """Argument of a command, or value of a variable."""

    text: str
    """Text. Unknown parts stand as in the script."""
    unknown: str | None = None
    """Reason why a part of the text is unknown. None if all of it is known."""
    alternatives: tuple[Word, ...] = ()
    """Words that the branches of unknown conditions give. Empty if there is only one, or too many."""
    blank: str | None = None
    """Reason why a part of the text is empty although the script expects a value. None if no part is."""
    parts: tuple[Word, ...] = ()
    """Parts of an unknown word that are known or unknown by themselves. Empty if there is one part."""
    source: str = ""
    """Expansion in the script that gives no words, for the report. Empty for other words."""

    def __post_init__(self) -> None:
        check_size(len(self.text))
        # The object itself takes as much memory as some characters.
        spend(_WORD_STEPS + len(self.text))

    @property
    def known(self) -> str:
        """Text of the word. Raises ``UnknownValueError`` if a part of it is unknown."""
        if self.unknown:
            raise UnknownValueError(self.unknown)
        return self.text

    @property
    def splits(self) -> list[Word]:
        """Words that an unquoted expansion gives. Those of each alternative are known, others keep the reason."""
        if self.source:
            return [self]
        if not self.unknown:
            return [replace(self, text=part) for part in self.text.split()]
        if not self.alternatives:
            return self._split_parts() if self.parts else [self]
        merged = self.alternatives[0].splits
        for word in self.alternatives[1:]:
            merged = merge_words(merged, word.splits, self.unknown)
        return merged

    def _split_parts(self) -> list[Word]:
        """Return the words of a text with unknown parts. Those that no unknown part touches are known."""
        pieces: list[Word] = []
        is_new = True
        for part in self.parts:
            for text in [part.text] if part.unknown else re.split(r"(\s+)", part.text):
                if not text or text.isspace():
                    is_new = is_new or bool(text)
                    continue
                piece = Word(text, part.unknown)
                if is_new:
                    pieces.append(piece)
                else:
                    pieces[-1] = Word(pieces[-1].text + text, pieces[-1].unknown or part.unknown)
                is_new = False
        return pieces


Variable = dict[str, Word]
"""Elements of a variable by index or key. A scalar has the only key ``"0"``."""


def join_words(words: Sequence[Word]) -> Word:
    """Return the concatenation of words."""
    check_size(sum(len(word.text) for word in words))
    spend(10 * sum(1 + len(word.parts) for word in words))
    unknown = next((word.unknown for word in words if word.unknown), None)
    blank = next((word.blank for word in words if word.blank), None)
    choices = [word.alternatives or (word,) for word in words]
    alternatives: tuple[Word, ...] = ()
    num_alternatives = math.prod(map(len, choices))
    if num_alternatives > _MAX_ALTERNATIVES:
        words = [Word(_SEVERAL, word.unknown) if word.alternatives else word for word in words]
    elif num_alternatives > 1:
        alternatives = tuple(join_words(combination) for combination in itertools.product(*choices))
    parts = tuple(part for word in words for part in (word.parts or (word,))) if unknown and not alternatives else ()
    return Word("".join(word.text for word in words), unknown, alternatives, blank, parts)


def merge_words(first: Sequence[Word], second: Sequence[Word], reason: str) -> list[Word]:
    """Return the words of two branches in order. Words of only one branch become unknown."""
    spend(len(first) * len(second))
    merged: list[Word] = []
    for tag, i, j, k, m in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        if tag == "equal":
            merged += first[i:j]
        else:
            merged += [word if word.unknown else replace(word, unknown=reason) for word in (*first[i:j], *second[k:m])]
    return merged


@dataclass
class State:
    """Variables at one point of a script."""

    variables: dict[str, Variable] = field(default_factory=dict)
    folder: str | None = None
    """Working folder. None if it is unknown."""
    has_ended: bool = False
    """True after ``exit``, or after ``return`` in a function."""
    changed_by: str | None = None
    """Reason why any variable may have another value, such as a sourced file that was not read."""

    def copy(self) -> State:
        """Return a state that can change independently."""
        spend(sum(10 + len(value) for value in self.variables.values()))
        return replace(self, variables={name: dict(value) for name, value in self.variables.items()})

    def set(self, name: str, word: Word) -> None:
        """Assign a scalar."""
        self.variables[name] = {"0": word}

    def forget(self, reason: str) -> None:
        """Make the value of every variable unknown."""
        self.changed_by = reason
        for name, value in self.variables.items():
            self.variables[name] = {
                key: word if word.unknown else replace(word, unknown=reason) for key, word in value.items()
            } or {"0": Word("", reason)}


def merge_states(states: Sequence[State], line: int) -> State:
    """Return the state after branches of which any may have been taken. ``line`` is that of the condition."""
    merged = states[0].copy()
    for state in states[1:]:
        for name in [*merged.variables, *(name for name in state.variables if name not in merged.variables)]:
            reason = f"${name} is set under a condition (line {line})"
            merged.variables[name] = _merge_variables(merged.variables.get(name), state.variables.get(name), reason)
        merged.folder = merged.folder if merged.folder == state.folder else None
        merged.changed_by = merged.changed_by or state.changed_by
    return merged


def _merge_variables(first: Variable | None, second: Variable | None, reason: str) -> Variable:
    if first is not None and first == second:
        return first
    one, two = first or {}, second or {}
    keys = {**one, **two}
    if list(keys) != ["0"] and all(key.isdigit() for key in keys):
        merged = merge_words(list(one.values()), list(two.values()), reason)
        return {str(i): word for i, word in enumerate(merged)}
    return {key: _merge_scalars(one.get(key), two.get(key), reason) for key in keys}


def matches(text: str, pattern: str) -> bool:
    """Return True if a text matches a shell pattern."""
    spend(1 + len(text) * len(pattern) // 10)
    return fnmatch.fnmatchcase(text, pattern)


def _merge_scalars(first: Word | None, second: Word | None, reason: str) -> Word:
    words = [word or Word("") for word in (first, second)]
    if words[0] == words[1] and first and second:
        return words[0]
    alternatives = tuple(dict.fromkeys(choice for word in words for choice in (word.alternatives or (word,))))
    if len(alternatives) > _MAX_ALTERNATIVES:
        return Word(_SEVERAL, reason)
    return Word(words[0].text, reason, alternatives)


def split_clause(node: Node) -> tuple[list[Node], list[Node]]:
    """Return the condition and the body of ``if`` or ``elif``, or the body of ``else``."""
    condition: list[Node] = []
    body: list[Node] = []
    is_body = node.type == "else_clause"
    for child in node.children:
        if child.type == "then":
            is_body = True
        elif child.is_named and child.type not in ("elif_clause", "else_clause"):
            (body if is_body else condition).append(child)
    return condition, body


def patterns(item: Node) -> list[Node]:
    """Return the patterns of a branch of ``case``."""
    return [child for child in item.children_by_field_name("value") if child.is_named]


def _descendants(node: Node) -> Iterator[Node]:
    yield node
    for child in node.named_children:
        yield from _descendants(child)


def assigned_names(node: Node) -> list[str]:
    """Return the variables that a part of the script may set."""
    names: list[str] = []
    for part in _descendants(node):
        name = part.child_by_field_name("name")
        if part.type == "variable_assignment":
            names.append(node_text(name).partition("[")[0])
        elif part.type in ("binary_expression", "postfix_expression", "unary_expression"):
            operand = part.named_children[0] if part.named_children else None
            is_set = any(child.type in ("=", "+=", "-=", "*=", "++", "--") for child in part.children)
            if is_set and operand is not None and node_text(operand).isidentifier():
                names.append(node_text(operand))
        elif part.type == "for_statement":
            names.append(node_text(part.child_by_field_name("variable")))
        elif part.type == "command" and node_text(name) in ("read", "mapfile", "readarray"):
            names += [node_text(child) for child in part.named_children[1:] if node_text(child).isidentifier()]
    return list(dict.fromkeys(names))


def is_left_early(body: Node) -> bool:
    """Return True if a loop has ``break`` or ``continue``."""
    return any(node_text(part) in ("break", "continue") for part in _descendants(body) if part.type == "command_name")
