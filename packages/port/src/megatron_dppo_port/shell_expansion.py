"""Expansion of shell words: variables, arithmetic, and commands that only name paths or numbers."""

import fnmatch
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from tree_sitter import Node

from megatron_dppo_port.budget import spend
from megatron_dppo_port.shell_arithmetic import Arithmetic
from megatron_dppo_port.shell_output import command_output, resolve_path, substituted_commands
from megatron_dppo_port.shell_values import (
    State,
    UnknownValueError,
    UnsetVariableError,
    Variable,
    Word,
    join_words,
    line,
    matches,
    node_text,
    parse,
)

_SKIPPED = ("comment", "file_redirect", "heredoc_redirect", "herestring_redirect", "variable_assignment")
_SCRIPT_NAMES = ("BASH_SOURCE", "0")


class Expander(Arithmetic):
    """Expansion of words with the variables of a state."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.script: str | None = None
        """Absolute path of the script that is read. None if it has none."""
        self.arguments: list[Word] = []
        """Arguments of the script or of the current function."""

    def operand(self, node: Node) -> Word:
        """Return the value of an operand of arithmetic, where names need no ``$``."""
        if node.type == "subscript":
            return self._subscript(node)
        is_name = node.type in ("variable_name", "word") and node_text(node).isidentifier()
        return self._variable(node_text(node)) if is_name else self._value(node)

    def words(self, node: Node) -> list[Word]:
        """Return the words that a part of a command expands to."""
        if node.type in _SKIPPED:
            return []
        if node.type == "ERROR":
            text = node_text(node)
            return [Word(text, f"line {line(node)} cannot be parsed")] if text.strip("\\ \n") else []
        if node.type == "command_name" and len(node.named_children) == 1:
            return self.words(node.named_children[0])
        if (elements := self._all_elements(node)) is not None:
            return elements if node.type == "string" else [part for word in elements for part in word.splits]
        word = self.join(node)
        last = node.named_children[-1] if node.named_children else node
        if node.type == "expansion" and last.type in ("string", "raw_string") and self.join(last).text == word.text:
            # Quotes in ``${X:-"a b"}`` keep the words together.
            return [word]
        if node.type in ("expansion", "simple_expansion", "command_substitution"):
            return word.splits
        if node.type == "concatenation" and not word.unknown and "{" in word.text and node_text(node) == word.text:
            return [Word(text) for text in _braces(word.text)]
        return [word]

    def join(self, node: Node) -> Word:
        """Return the value of a node as one word."""
        try:
            return self._value(node)
        except UnknownValueError as reason:
            # Without white space, so that the known words around it can be told apart.
            return Word("".join(node_text(node).split()), str(reason))

    def _all_elements(self, node: Node) -> list[Word] | None:
        """Return the elements of ``${X[@]}`` or ``$@``. None for other nodes."""
        inner = node.named_children[0] if node.type == "string" and len(node.named_children) == 1 else node
        text = node_text(inner)
        if inner.type not in ("expansion", "simple_expansion") or (
            node.type == "string" and f'"{text}"' != node_text(node)
        ):
            return None
        if text in ("$@", "$*", "${@}", "${*}", "${@:1}"):
            return list(self.arguments)
        match = re.fullmatch(r"\$\{(\w+)\[[@*]\](?::?[-+]\"?\$?\{?\1?\[?@?\]?\}?\"?)?\}", text)
        if match is None:
            return None
        name = match.group(1)
        if name not in self.state.variables:
            if self.state.changed_by:
                return [Word(text, f"${name} {self.state.changed_by}")]
            # The environment holds no arrays, so this one is empty. The reader of the words reports it.
            return [Word("", blank=f"${name} is not set in the file", source=text)]
        spend(10 * len(self.state.variables[name]))
        return list(self.state.variables[name].values())

    def _value(self, node: Node) -> Word:
        kind, text = node.type, node_text(node)
        if node.has_error and kind != "expansion":
            raise UnknownValueError(f"line {line(node)} cannot be parsed")
        if kind == "raw_string":
            return Word(text[1:-1])
        if kind == "ansi_c_string":
            return Word(text[2:-1].replace("\\n", "\n").replace("\\t", "\t").replace("\\'", "'"))
        if kind == "word":
            return self._tilde(re.sub(r"\\(.)", r"\1", text.replace("\\\n", "")))
        if kind == "string_content":
            return Word(re.sub(r'\\(["\\$`])', r"\1", text.replace("\\\n", "")))
        if kind == "string":
            return self._string(node)
        if kind == "concatenation" and any(child.type == "$" for child in node.children):
            raise UnknownValueError(f"line {line(node)} cannot be parsed")
        if kind in ("concatenation", "command_name"):
            return _join_parts([self.join(child) for child in node.children], [_is_expansion(c) for c in node.children])
        if kind in ("simple_expansion", "expansion"):
            return self._expansion(node)
        if kind == "arithmetic_expansion":
            return Word(str(self.integer(node)))
        if kind == "command_substitution":
            return self._substitution(node)
        if kind == "process_substitution":
            raise UnknownValueError(f"known only by running {text[:40]}")
        return Word(text)

    def _tilde(self, text: str) -> Word:
        home = self.state.variables.get("HOME")
        if text == "~" or text.startswith("~/"):
            return join_words([home["0"] if home else Word("~", "$HOME is not set"), Word(text[1:])])
        return Word(text)

    def _string(self, node: Node) -> Word:
        """Return the text between the quotes, with the white space around expansions."""
        parts: list[Word] = []
        expanded: list[bool] = []
        start = node.start_byte
        end = start + 1
        source = node.text or b""
        for child in node.named_children:
            parts += [Word(source[end - start : child.start_byte - start].decode()), self.join(child)]
            expanded += [False, _is_expansion(child)]
            end = child.end_byte
        return _join_parts([*parts, Word(source[end - start : -1].decode())], [*expanded, False])

    def _expansion(self, node: Node) -> Word:
        if node.has_error:
            return self._repaired_default(node)
        inside = [child for child in node.children if child.type not in ("$", "${", "}", "comment")]
        if not inside:
            raise UnknownValueError(f"{node_text(node)} is an unsupported expansion")
        first = inside[0]
        if first.type == "#" and len(inside) == 2:
            return self._length(inside[1])
        if first.type == "!" and len(inside) == 2:
            return self._variable(self._variable(node_text(inside[1])).known)
        if first.type not in ("variable_name", "special_variable_name", "subscript"):
            raise UnknownValueError(f"{node_text(node)} is an unsupported expansion")
        if len(inside) == 1:
            return self._parameter(first)
        sign = inside[1].type
        if sign in (":-", "-", ":=", "=", ":+", "+", ":?", "?"):
            return self._default(first, sign, inside[2:])
        return self._transform(node, self._parameter(first), sign, inside[2:])

    def _repaired_default(self, node: Node) -> Word:
        """Return the value of ``${X:-default}`` whose default the grammar does not parse there, but does alone."""
        match = re.fullmatch(r"\$\{(\w+):?-(.*)\}", node_text(node), re.DOTALL)
        tree = parse(f"{match.group(1)}={match.group(2)}") if match else node
        if match is None or tree.has_error:
            raise UnknownValueError(f"line {line(node)} cannot be parsed")
        known = self.state.variables.get(match.group(1), {}).get("0")
        if known is None and self.state.changed_by:
            raise UnknownValueError(f"${match.group(1)} {self.state.changed_by}")
        if known is not None and (known.text or known.unknown):
            return known
        value = tree.named_children[0].child_by_field_name("value")
        return self.join(value) if value is not None else Word("")

    def _parameter(self, node: Node) -> Word:
        return self._subscript(node) if node.type == "subscript" else self._variable(node_text(node))

    def _variable(self, name: str) -> Word:
        if name in _SCRIPT_NAMES and self.script:
            return Word(self.script)
        if name == "#":
            return Word(str(len(self.arguments)))
        if name in ("@", "*"):
            return join_words([part for word in self.arguments for part in (word, Word(" "))][:-1])
        if name.isdigit() and name != "0":
            if int(name) <= len(self.arguments):
                return self.arguments[int(name) - 1]
            raise UnsetVariableError(f"argument ${name} of the script is not known")
        if name not in self.state.variables:
            raise UnsetVariableError(f"${name} is not set in the file")
        return self.state.variables[name].get("0", Word(""))

    def _subscript(self, node: Node) -> Word:
        name, index = node.child_by_field_name("name"), node.child_by_field_name("index")
        if node_text(name) in _SCRIPT_NAMES:
            return self._variable(node_text(name))
        variable = self.state.variables.get(node_text(name))
        if variable is None or index is None:
            raise UnsetVariableError(f"${node_text(name)} is not set in the file")
        if node_text(index) in ("@", "*"):
            return join_words([part for word in variable.values() for part in (word, Word(" "))][:-1])
        return self._select(node, variable, index)

    def _select(self, node: Node, variable: Variable, index: Node) -> Word:
        spend(len(variable))
        uncertain = next((word.unknown for word in variable.values() if word.unknown), None)
        if uncertain:
            raise UnknownValueError(uncertain)
        key = self.join(index).known
        # A subscript is arithmetic, where a name needs no ``$``.
        if key not in variable and key.isidentifier() and key in self.state.variables:
            key = self._variable(key).known
        if re.fullmatch(r"-\d{1,9}", key) and all(name.isdigit() for name in variable):
            key = str(len(variable) + int(key))
        if key not in variable:
            raise UnsetVariableError(f"{node_text(node)} is not set in the file")
        return variable[key]

    def _default(self, parameter: Node, sign: str, arguments: Sequence[Node]) -> Word:
        name = node_text(parameter)
        value = None
        with suppress(UnsetVariableError):
            value = self._parameter(parameter)
        is_set = value is not None and not (sign.startswith(":") and value.text == "" and not value.unknown)
        if value is None and self.state.changed_by:
            raise UnknownValueError(f"${name} {self.state.changed_by}")
        # With a colon the default replaces an empty value too, so a value that may be empty decides nothing.
        if value is not None and value.unknown and sign.startswith(":") and _may_be_empty(value):
            raise UnknownValueError(value.unknown)
        text = join_words([self.join(child) for child in arguments if child.is_named])
        if sign in (":+", "+"):
            return text if is_set else Word("")
        if value is not None and is_set:
            return value
        if sign in (":?", "?"):
            raise UnknownValueError(f"${name} must be set, the script says")
        if not text.unknown and not text.text:
            text = replace(text, blank=f"${name} is empty unless the environment sets it")
        if sign in (":=", "=") and parameter.type == "variable_name":
            self.state.set(name, text)
        return text

    def _transform(self, node: Node, value: Word, sign: str, arguments: Sequence[Node]) -> Word:
        text = value.known
        parts = re.fullmatch(r"\$\{\w+(?:\[[^]]*\])?(%%|%|##|#|//|/|:|,,|\^\^|,|\^)(.*)\}", node_text(node), re.DOTALL)
        if parts is None:
            raise UnknownValueError(f"{node_text(node)} is an unsupported expansion")
        sign, argument = parts.groups()
        if sign in (",,", "^^") and not argument:
            return Word(text.lower() if sign == ",," else text.upper())
        for child in arguments:
            if child.is_named and child.type in ("expansion", "simple_expansion", "string"):
                argument = argument.replace(node_text(child), self.join(child).known)
        if sign in ("%", "%%", "#", "##"):
            return Word(_strip(text, argument.strip("\"'"), sign))
        if sign in ("/", "//"):
            # An escaped slash separates nothing.
            # NUL stands for an escaped slash, since no argument of a command can contain it.
            pattern, _, replacement = argument.replace("\\/", "\0").partition("/")
            return Word(
                _substitute(text, pattern.replace("\0", "/"), replacement.replace("\0", "/").strip("\"'"), sign)
            )
        if sign == ":" and (bounds := re.fullmatch(r"\s*(-?\d{1,18})(?::(-?\d{1,18}))?", argument)):
            start = int(bounds.group(1))
            tail = text[start:] if start >= 0 or -start <= len(text) else ""
            return Word(tail if bounds.group(2) is None else tail[: int(bounds.group(2))])
        raise UnknownValueError(f"{node_text(node)} is an unsupported expansion")

    def _length(self, node: Node) -> Word:
        if node.type == "subscript" and node_text(node).endswith(("[@]", "[*]")):
            variable = self.state.variables.get(node_text(node.child_by_field_name("name")), {})
            _ = join_words(list(variable.values())).known
            return Word(str(len(variable)))
        return Word(str(len(self._parameter(node).known)))

    def _substitution(self, node: Node) -> Word:
        """Return the output of a command that only names a path or numbers."""
        text = node_text(node)
        if text.startswith("$((") and text.endswith("))"):
            # The grammar takes arithmetic in a default value for a command.
            inner = parse(f"X={text}").named_children[0].child_by_field_name("value")
            if inner is not None and inner.type == "arithmetic_expansion":
                return Word(str(self.integer(inner)))
        unknown = UnknownValueError(f"known only by running {text[:40]}")
        folder, output = self.state.folder, None
        for command in substituted_commands(node):
            if command is None or output is not None:
                raise unknown
            words = [word for part in command.named_children for word in self.words(part)]
            # Unknown arguments raise: the output depends on them.
            name, arguments = words[0].text, [word.known for word in words[1:] if word.text != "--"]
            if name == "cd" and len(arguments) == 1:
                folder = resolve_path(folder, arguments[0])
            else:
                output = command_output(name, arguments, folder)
        if output is None:
            raise unknown
        return Word(output)


def _may_be_empty(word: Word) -> bool:
    return not word.alternatives or not all(choice.text for choice in word.alternatives)


def _is_expansion(node: Node) -> bool:
    return node.type in ("expansion", "simple_expansion") or (
        node.type == "string" and len(node.named_children) == 1 and _is_expansion(node.named_children[0])
    )


def _join_parts(parts: Sequence[Word], expanded: Sequence[bool]) -> Word:
    """Return the concatenation. A path that begins with an empty variable is marked: the script means another one."""
    joined = join_words(parts)
    for i, part in enumerate(parts):
        if not expanded[i] or part.unknown or part.text:
            continue
        spend(len(parts) + len(joined.text))
        before = "".join(word.text for word in parts[:i])
        after = "".join(word.text for word in parts[i + 1 :])
        # ``$X/models`` with an empty X is the absolute path ``/models``.
        if after.startswith("/") and before[-1:] in ("", "=", "[", ",", "'", '"'):
            return replace(joined, blank=joined.blank or f"the path {after[:40]!r} begins with an empty variable")
    return joined


def _strip(text: str, pattern: str, sign: str) -> str:
    """Remove the shortest or longest prefix (``#``, ``##``) or suffix (``%``, ``%%``) that matches a pattern."""
    lengths = range(len(text) + 1) if len(sign) == 1 else range(len(text), -1, -1)
    # The first match wins: the shortest for one sign, the longest for two.
    for length in lengths:
        part = text[:length] if sign[0] == "#" else text[len(text) - length :]
        if matches(part, pattern):
            return text[length:] if sign[0] == "#" else text[: len(text) - length]
    return text


def _substitute(text: str, pattern: str, replacement: str, sign: str) -> str:
    # ``translate`` anchors the end, but a substitution may be anywhere.
    expression = fnmatch.translate(pattern.strip("\"'")).removesuffix("\\Z").removesuffix("\\z")
    # A star may be tried at each character.
    spend(1 + len(text) * len(text) // 100 + len(text) * len(pattern) // 10)

    def replaced(match: re.Match[str]) -> str:
        spend(1 + len(replacement))
        return replacement

    return re.sub(expression, replaced, text, count=1 if sign == "/" else 0)


def _braces(text: str) -> list[str]:
    match = re.fullmatch(r"([^{}]*)\{([^{}]*,[^{}]*)\}([^{}]*)", text)
    if match is None:
        return [text]
    parts = match.group(2).split(",")
    spend(len(parts) * len(text))
    return [match.group(1) + part + match.group(3) for part in parts]
