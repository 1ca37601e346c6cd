"""Control flow of a shell script: assignments, conditions, loops and functions.

Conditions with a known value select their branch. After a condition with an unknown value, whatever the branches set
differently is unknown, with the reason.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tree_sitter import Node

from megatron_dppo_port.budget import spend
from megatron_dppo_port.shell_conditions import both, evaluate_test, negate
from megatron_dppo_port.shell_expansion import Expander
from megatron_dppo_port.shell_values import (
    State,
    UnknownValueError,
    Variable,
    Word,
    assigned_names,
    is_left_early,
    join_words,
    line,
    matches,
    merge_states,
    node_text,
    patterns,
    split_clause,
)

_MAX_ITERATIONS = 1000
_STATEMENT_STEPS = 1000


@dataclass(frozen=True)
class Command:
    """Command that the script starts."""

    words: list[Word]
    condition: str | None
    """Unknown condition under which it is started. None if it always is."""
    line: int


@dataclass
class Script:
    """Commands of a script, and what a reader must know about them."""

    commands: list[Command] = field(default_factory=list)
    stops: list[tuple[int, str]] = field(default_factory=list)
    """Places where the script ends by itself: the number of commands before it, and the line with its condition."""
    unread: list[str] = field(default_factory=list)
    """Parts that may set any variable and were not read."""


class ControlFlow(ABC):
    """Reader of statements. A subclass reads commands."""

    def __init__(self, state: State) -> None:
        self.expander = Expander(state)
        self.script = Script()
        self._conditions: list[str] = []
        self._functions: dict[str, Node] = {}
        self._locals: list[dict[str, Variable | None]] = []

    @property
    def _state(self) -> State:
        return self.expander.state

    def walk_all(self, node: Node) -> bool | None:
        """Read the statements of a node, and return the status of the last."""
        return self.walk_each(node.named_children)

    def walk(self, node: Node) -> bool | None:
        """Read a statement, and return whether it succeeds. None if that is unknown."""
        # Its parts are looked through once or a few times.
        spend(_STATEMENT_STEPS + node.end_byte - node.start_byte)
        if node.type == "ERROR" and node_text(node).strip("\\ \n"):
            self.script.unread.append(f"line {line(node)}: {node_text(node)[:40]!r} cannot be parsed")
        if node.type == "command":
            return self.command(node)
        rule = _RULES.get(node.type)
        return rule(self, node) if rule is not None else self.walk_all(node)

    @abstractmethod
    def command(self, node: Node) -> bool | None:
        """Read a command."""

    def assign(self, node: Node) -> bool | None:
        """Read ``X=value``, ``X+=value``, ``X=(...)`` or ``X[i]=value``."""
        name_node, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        name, key = node_text(name_node), "0"
        if name_node is not None and name_node.type == "subscript":
            index = name_node.child_by_field_name("index")
            name = node_text(name_node.child_by_field_name("name"))
            word = self.expander.join(index) if index is not None else Word("0")
            if word.unknown:
                self._state.variables[name] = {"0": Word("", word.unknown)}
                return True
            key = word.text
        is_added = any(child.type == "+=" for child in node.children)
        variable = dict(self._state.variables.get(name, {}))
        spend(10 * len(variable))
        if value is not None and value.type == "array":
            elements = self._array(value)
            start = len(variable) if is_added else 0
            before = variable if is_added else {}
            self._state.variables[name] = before | {k or str(start + i): word for i, (k, word) in enumerate(elements)}
            return True
        word = self.expander.join(value) if value is not None else Word("")
        if is_added:
            word = join_words([variable.get(key, Word("")), word])
        # ``X=v`` on an array sets its element 0 and no other element, as in bash.
        self._state.variables[name] = variable | {key: word} if key != "0" or len(variable) > 1 else {"0": word}
        return True

    def _array(self, node: Node) -> list[tuple[str, Word]]:
        elements: list[tuple[str, Word]] = []
        for part in node.named_children:
            for word in self.expander.words(part):
                match = (
                    re.fullmatch(r"\[([^]]+)\]=(.*)", word.text, re.DOTALL) if node_text(part).startswith("[") else None
                )
                elements.append((match.group(1), replace(word, text=match.group(2))) if match else ("", word))
        return elements

    def declare(self, node: Node) -> bool | None:
        """Read ``export``, ``declare``, ``local`` and ``readonly``."""
        is_local = bool(self._locals) and node.children[0].type in ("local", "declare", "typeset")
        for child in node.named_children:
            # ``X+=v`` and ``X[i]=v`` name X, too.
            name = node_text(child).partition("=")[0].partition("[")[0].rstrip("+")
            if is_local and child.type in ("variable_assignment", "variable_name"):
                self._locals[-1].setdefault(name, self._state.variables.get(name))
            if child.type == "variable_assignment":
                self.assign(child)
        return True

    def unset(self, node: Node) -> bool | None:
        """Read ``unset X``."""
        for child in node.named_children:
            self._state.variables.pop(node_text(child), None)
        return True

    def define(self, node: Node) -> bool | None:
        """Remember a function."""
        body = node.child_by_field_name("body")
        if body is not None:
            self._functions[node_text(node.child_by_field_name("name"))] = body
        return True

    def branch(self, node: Node) -> None:
        """Read ``if``, with the branches that its conditions leave possible."""
        heads = [child for child in node.named_children if child.type in ("elif_clause", "else_clause")]
        self._try_branches(node, [node, *heads])

    def _try_branches(self, node: Node, clauses: Sequence[Node]) -> None:
        if not clauses:
            return
        clause, later = clauses[0], clauses[1:]
        condition, body = split_clause(clause)
        status = self.walk_each(condition) if clause.type != "else_clause" else True
        text = " ".join(" ".join(node_text(part) for part in condition).split())[:60]
        if status is True:
            with_reason = f"line {line(clause)}: {text}"
            self._guarded(with_reason, lambda: self.walk_each(body))
        elif status is False:
            self._try_branches(node, later)
        else:
            choices = [lambda: self.walk_each(body), lambda: self._try_branches(node, later)]
            self._either(line(clause), text, choices)

    def walk_each(self, nodes: Sequence[Node]) -> bool | None:
        """Read statements in order. Return whether the last one succeeds. None if that is unknown."""
        status: bool | None = True
        for child in nodes:
            if self._state.has_ended:
                break
            if child.type not in ("comment", "heredoc_body", "heredoc_start"):
                status = self.walk(child)
        return status

    def _guarded(self, condition: str, body: Callable[[], object]) -> None:
        """Read a branch that is taken. If it ends the script before the launch, that is noted and reading goes on."""
        stops = len(self.script.stops)
        body()
        self.script.stops[stops:] = [
            (position, f"{text} ({condition})") for position, text in self.script.stops[stops:]
        ]

    def _either(self, number: int, condition: str, choices: Sequence[Callable[[], object]]) -> None:
        """Read branches of which any may be taken, and merge the variables."""
        start = self._state
        ends: list[State] = []
        self._conditions.append(f"{condition} (line {number})")
        for choice in choices:
            self.expander.state = start.copy()
            choice()
            if not self._state.has_ended:
                # A branch that ends the script has no part in what follows.
                ends.append(self._state)
        self._conditions.pop()
        self.expander.state = merge_states(ends, number) if ends else replace(start, has_ended=True)

    def select(self, node: Node) -> None:
        """Read ``case``."""
        value = node.child_by_field_name("value")
        word = self.expander.join(value) if value is not None else Word("")
        items = [child for child in node.named_children if child.type == "case_item"]
        bodies = [
            [child for child in item.children if child.is_named and child not in patterns(item)] for item in items
        ]
        condition = f"case {node_text(value)}"
        if word.unknown:
            choices: list[Callable[[], object]] = [lambda body=body: self.walk_each(body) for body in bodies]  # type: ignore[misc]
            # Without a default it may be that no item matches.
            if not any(node_text(pattern) == "*" for item in items for pattern in patterns(item)):
                choices.append(lambda: None)
            self._either(line(node), condition, choices)
            return
        for item, body in zip(items, bodies, strict=True):
            if any(matches(word.text, self._pattern(pattern)) for pattern in patterns(item)):
                self._guarded(f"line {line(item)}: {condition}", lambda body=body: self.walk_each(body))  # type: ignore[misc]
                break

    def _pattern(self, node: Node) -> str:
        return node_text(node) if node.type in ("extglob_pattern", "regex") else self.expander.join(node).text

    def combine(self, node: Node) -> bool | None:
        """Read ``a && b`` and ``a || b``."""
        left, right = node.named_children[0], node.named_children[-1]
        is_and = any(child.type == "&&" for child in node.children)
        first = self.walk(left)
        if self._state.has_ended:
            return first
        if first is None:
            self._either(line(node), node_text(left)[:60], [lambda: self.walk(right), lambda: None])
            return None
        # ``false && x`` and ``true || x`` do not run x.
        if first is not is_and:
            return first
        second: list[bool | None] = []
        self._guarded(f"line {line(node)}: {node_text(left)[:60]}", lambda: second.append(self.walk(right)))
        return both(first, second[0]) if is_and else second[0]

    def compound(self, node: Node) -> bool | None:
        """Read ``{ ...; }`` or evaluate ``(( ... ))``."""
        if node.children and node.children[0].type == "((":
            return self._arithmetic(node.named_children[-1]) if node.named_children else None
        return self.walk_all(node)

    def _arithmetic(self, node: Node) -> bool | None:
        try:
            return self.expander.integer(node) != 0
        except UnknownValueError as reason:
            for name in assigned_names(node):
                self._state.set(name, Word("", str(reason)))
            return None

    def isolated(self, node: Node) -> None:
        """Read a subshell or a pipeline, whose assignments end with it."""
        state = self._state
        self.expander.state = state.copy()
        for child in node.named_children:
            self.walk(child)
        self.expander.state = state

    def redirected(self, node: Node) -> bool | None:
        """Read a statement with redirections."""
        body = node.child_by_field_name("body")
        return self.walk(body) if body is not None else None

    def loop(self, node: Node) -> None:
        """Read ``for X in words``. Known words are gone through, unless the loop is left early."""
        body = node.child_by_field_name("body")
        name = node_text(node.child_by_field_name("variable"))
        values = [
            child for child in node.named_children if child != body and child.type not in ("variable_name", "comment")
        ]
        words = [word for value in values for word in self.expander.words(value)]
        if body is None:
            return
        if any(word.unknown for word in words) or len(words) > _MAX_ITERATIONS or is_left_early(body):
            self._unknown_loop(node, body, [name] if words else [])
            return
        for word in words:
            self._state.set(name, word)
            self.walk(body)

    def counted_loop(self, node: Node) -> None:
        """Read ``for ((i = 0; i < n; i++))``."""
        body = node.child_by_field_name("body")
        parts = [node.child_by_field_name(part) for part in ("initializer", "condition", "update")]
        if body is None or any(part is None for part in parts) or is_left_early(body):
            self._unknown_loop(node, node, [])
            return
        start, condition, update = (part for part in parts if part is not None)
        self._arithmetic(start)
        for _ in range(_MAX_ITERATIONS):
            status = self._arithmetic(condition)
            if status is not True:
                break
            self.walk(body)
            self._arithmetic(update)
        # The limit ended the loop, or its condition became unknown.
        if status is not False:
            self._unknown_loop(node, body, [])

    def repeat(self, node: Node) -> None:
        """Read ``while``. Its body is skipped if the condition is false from the start."""
        body = node.child_by_field_name("body")
        conditions = [child for child in node.children_by_field_name("condition") if child.is_named]
        status = self.walk_each(conditions)
        is_until = any(child.type == "until" for child in node.children)
        if body is not None and (negate(status) if is_until else status) is not False:
            self._unknown_loop(node, body, [])

    def _unknown_loop(self, node: Node, body: Node, names: Sequence[str]) -> None:
        changed = [*names, *assigned_names(body)]
        # Unknown before the body, which may read what an earlier pass has set; and unknown after it, because the body
        # was read once.
        for name in changed:
            self._state.set(name, Word(f"${name}", f"${name} is set in a loop (line {line(node)})"))
        self._either(line(node), "a loop", [lambda: self.walk_all(body), lambda: None])
        for name in changed:
            self._state.set(name, Word(f"${name}", f"${name} is set in a loop (line {line(node)})"))


_RULES: dict[str, Callable[[ControlFlow, Node], bool | None]] = {
    "variable_assignment": ControlFlow.assign,
    "declaration_command": ControlFlow.declare,
    "unset_command": ControlFlow.unset,
    "function_definition": ControlFlow.define,
    "if_statement": ControlFlow.branch,
    "case_statement": ControlFlow.select,
    "list": ControlFlow.combine,
    "test_command": lambda reader, node: evaluate_test(reader.expander, node),
    "compound_statement": ControlFlow.compound,
    "negated_command": lambda reader, node: negate(reader.walk_all(node)),
    "subshell": ControlFlow.isolated,
    "pipeline": ControlFlow.isolated,
    "redirected_statement": ControlFlow.redirected,
    "for_statement": ControlFlow.loop,
    "c_style_for_statement": ControlFlow.counted_loop,
    "while_statement": ControlFlow.repeat,
}
