"""Words and variables of a shell script whose values may be unknown."""

from __future__ import annotations

import fnmatch
import itertools
import math
import re
from collections.abc import Mapping, Sequence
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
    first_keys, second_keys = list(first or {}), list(second or {})
    if first_keys in (["0"], []) and second_keys in (["0"], []) and (first or second):
        return {"0": _merge_scalars(first, second, reason)}
    if all(key.isdigit() for key in (*first_keys, *second_keys)):
        merged = merge_words(list((first or {}).values()), list((second or {}).values()), reason)
        return {str(i): word for i, word in enumerate(merged)}
    return {
        key: _merge_scalars(_element(first, key), _element(second, key), reason)
        for key in {**(first or {}), **(second or {})}
    }


def matches(text: str, pattern: str) -> bool:
    """Return True if a text matches a shell pattern."""
    spend(1 + len(text) * len(pattern) // 10)
    return fnmatch.fnmatchcase(text, pattern)


def _element(variable: Mapping[str, Word] | None, key: str) -> Variable | None:
    return {"0": variable[key]} if variable is not None and key in variable else None


def _merge_scalars(first: Variable | None, second: Variable | None, reason: str) -> Word:
    words = [value["0"] if value else Word("") for value in (first, second)]
    if words[0] == words[1] and first and second:
        return words[0]
    alternatives = tuple(dict.fromkeys(choice for word in words for choice in (word.alternatives or (word,))))
    if len(alternatives) > _MAX_ALTERNATIVES:
        return Word(_SEVERAL, reason)
    return Word(words[0].text, reason, alternatives)
